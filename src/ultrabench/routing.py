"""The words of a routing, and how skewed routing spreads tokens over experts."""

LEARNED_ROUTING = "learned"
"""The routing by scores of the router; every other routing chooses experts by the position of a token."""
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
