"""The words of a routing, and how skewed routing spreads tokens over experts."""

BALANCED_ROUTING = "balanced"
"""The routing that gives each expert as many tokens as any other: forced balance, with which most recipes are
measured."""
LEARNED_ROUTING = "learned"
"""The routing by scores of the router; every other routing chooses experts by the position of a token."""
LEARNED_SKEW = "skew=0.15"
"""The skewed routing as which a learned one is predicted: with it, layouts with 8 ranks of ep take 1.2 times as long.
Six pairs of published runs took 1.09 to 2.2 times as long with a learned router as with forced balance, half of them
more than 1.23 times (299 and 199 TFLOP/s, 295 and 237, 335 and 277, 368 and 320, 389 and 357; 32.4 and 14.7 % MFU)."""
SKEW_PREFIX = "skew="
"""How the word of a skewed routing begins; the exponent of its power law follows, as in `skew=1.5`."""


def override_value(routing: str) -> str:
    """The word of a routing as the value of an override: in double quotes where it has a second `=`."""
    return f'"{routing}"' if routing.startswith(SKEW_PREFIX) else routing


def routing_text(routing: str | None) -> str:
    """How texts for people name a routing, such as `routing balanced`; empty where there is none."""
    return f"routing {routing}" if routing else ""


def expert_shares(routing: str, num_experts: int, num_chosen: int) -> tuple[float, ...]:
    """The share of all tokens that each expert gets under a skewed `routing`; the shares add up to `num_chosen`.

    Each token chooses `num_chosen` different experts, so that no share is above 1. With skew=A expert e = 0, 1, ...
    gets min(1, c (e + 1)**-A) of the tokens, where c makes the shares add up.
    """
    exponent = float(routing.removeprefix(SKEW_PREFIX))
    powers = [(expert + 1) ** -exponent for expert in range(num_experts)]
    num_certain = 0  # number of experts that every token chooses; the first ones, as their powers are largest
    while (scale := (num_chosen - num_certain) / sum(powers[num_certain:])) * powers[num_certain] > 1:
        num_certain += 1
    return (*[1.0] * num_certain, *(scale * power for power in powers[num_certain:]))
