"""What a probe of devices and links is expected to need."""

from ultrabench.device_rates import OPERATIONS, long_form, share
from ultrabench.hardware import Hardware
from ultrabench.sweep.predict import LINK_EFFICIENCY, RANK_START_S, Prediction


def predict_probe(hardware: Hardware, nodes: int, steps: int) -> Prediction:
    """What a run of `steps` steps needs; a step is every operation in every size, over all ranks and inside the nodes.

    t = calls * sum(S * f) / link, with the shares f and sizes S of `ultrabench.device_rates`.
    """
    form, inside = long_form(hardware.device, 0, 1), hardware.gpus_per_node
    ranks, link = inside * nodes, hardware.link_bytes_per_s
    scopes = [(ranks, min(link, hardware.node_link_bytes_per_s) if nodes > 1 else link)]
    scopes += [(inside, link)] if nodes > 1 else []
    step_time_s = sum(
        form.calls * size * share(name, n) / (rate * LINK_EFFICIENCY)
        for n, rate in scopes
        for name in OPERATIONS
        for size in form.sizes_bytes
    )
    on_host = ranks if hardware.simulated else inside
    start = RANK_START_S[hardware.device] * (on_host if hardware.device == "cpu" else 1)
    memory = 3.0 * max(form.sizes_bytes)
    return Prediction(
        step_time_s=step_time_s,
        peak_mem_bytes=memory,
        memory_share=memory / hardware.rank_mem_bytes,
        duration_s=start + 2 * form.device_s + steps * step_time_s,
    )
