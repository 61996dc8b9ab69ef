"""What the blocks of a layer are made of: products of each token with weights, and what is kept of them."""

from typing import NamedTuple

COLUMNS, ROWS, WHOLE = "columns", "rows", "whole"
"""How tensor parallelism cuts a product: by its outputs, by its inputs, or not at all, on the rank's own tokens."""


class Product(NamedTuple):
    """A product of each token with a matrix of weights."""

    outputs: int
    inputs: int
    cut: str
    """COLUMNS, ROWS or WHOLE."""
    kept_share: float = 0.0
    """Share of its outputs that recompute=selective keeps."""
    parts: tuple[int, ...] = ()
    """Outputs of each of its matrices of weights; empty: there is one."""

    @property
    def params(self) -> int:
        """Number of its weights."""
        return self.outputs * self.inputs


class Vector(NamedTuple):
    """Parameters of a block that are no weights of a product: of norms, convolutions, biases and heads."""

    length: int
    is_cut: bool = False
    """Whether tensor parallelism divides them."""


class Channels(NamedTuple):
    """Numbers that a block keeps of each token for backward, beside the inputs and outputs of norms."""

    cut: int
    """Those that tensor parallelism divides."""
    whole: int = 0
    """Those that a rank keeps of each of its own tokens."""


def num_params(products: tuple[Product, ...]) -> int:
    """Number of the weights of products."""
    return sum(product.params for product in products)


def num_vector_params(vectors: tuple[Vector, ...]) -> int:
    """Number of the parameters of vectors."""
    return sum(vector.length for vector in vectors)
