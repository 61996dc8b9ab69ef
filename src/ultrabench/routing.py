"""The words of a routing, and how skewed routing spreads tokens over experts."""

SKEW_PREFIX = "skew="
"""What the exponent of a power law follows in the word of a routing, such as `skew=1.5`."""


def override_value(routing: str) -> str:
    """The word of a routing as the value of an override: in double quotes where it has a second `=`."""
    return f'"{routing}"' if routing.startswith(SKEW_PREFIX) else routing


def routing_text(routing: str | None) -> str:
    """How texts for people name a routing, such as `routing balanced`; empty where there is none."""
    return f"routing {routing}" if routing else ""


def expert_shares(routing: str, num_experts: int, num_chosen: int) -> tuple[float, ...]:
    """Share of the tokens that each expert gets; together they are `num_chosen`, the number of experts of a token.

    With skew=A expert e gets min(1, c (e + 1)**-A), where c makes the shares add up; a token chooses an expert at most once.
    """
    exponent = float(routing.removeprefix(SKEW_PREFIX))
    powers = [(expert + 1) ** -exponent for expert in range(num_experts)]
    num_full = 0  # experts that every token chooses
    while (scale := (num_chosen - num_full) / sum(powers[num_full:])) * powers[num_full] > 1:
        num_full += 1
    return (*[1.0] * num_full, *(scale * power for power in powers[num_full:]))
