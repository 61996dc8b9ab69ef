"""What tensor parallelism adds to a model whose vocabulary or key/value heads its ranks cannot divide.

Ranks of tp hold equal parts, so that the vocabulary is padded with rows that are no tokens, and a key/value head is
copied to several ranks.
"""

from dataclasses import replace
from functools import lru_cache

from ultrabench.layer_type import LayerType
from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage

ROWS_MULTIPLE = 128
"""Number that divides the rows of a padded vocabulary on each rank, so that they suit the tensor cores of GPUs.

It is the default of Megatron-LM, where --make-vocab-size-divisible-by times tp divides the padded vocabulary.
"""

KV_COPIES_WORD = "kv_copies"
"""The word of a command, and of kernel.supports, for the ranks of tp that hold the same key/value head."""


def padded_vocab_size(vocab_size: int, tp: int, rows_multiple: int = ROWS_MULTIPLE) -> int:
    """Number of rows of the embedding, or of the head, on all ranks of tp together.

    It is `vocab_size` if tp divides that, else the next multiple of rows_multiple * tp. With ROWS_MULTIPLE, Megatron-LM
    pads any vocabulary so.
    """
    if vocab_size % tp == 0:
        return vocab_size
    multiple = rows_multiple * tp
    return -(-vocab_size // multiple) * multiple


def kv_copies(num_key_value_heads: int, tp: int) -> int:
    """Number of neighbouring ranks of tp that hold the same key/value head;
    1 unless there are more ranks than heads.
    """
    return max(1, tp // num_key_value_heads)


def fewest_kv_heads(shape: ModelShape) -> int | None:
    """The smallest number of key/value heads of the types of layers; None if no type has such heads."""
    attentions = (kind.grouped_query for kind in shape.kinds)
    return min((attention.num_key_value_heads for attention in attentions if attention), default=None)


def most_kv_copies(shape: ModelShape, tp: int) -> int:
    """Largest number of ranks of tp that hold the same key/value head, among the types of layers; 1 without copies."""
    num_heads = fewest_kv_heads(shape)
    return kv_copies(num_heads, tp) if num_heads else 1


@lru_cache(maxsize=1024)  # a plan asks for those of a few models for each of its candidates
def kinds_of_ranks(shape: ModelShape, tp: int) -> tuple[LayerType, ...]:
    """The types of layers of a model as all ranks of tp together hold them: with the copies of key/value heads."""
    return tuple(_with_copies(kind, tp) for kind in shape.kinds)


def _with_copies(kind: LayerType, tp: int) -> LayerType:
    """A type of layer with the copies of its key/value heads; other kinds of attention have no such heads."""
    attention = kind.grouped_query
    num_copies = kv_copies(attention.num_key_value_heads, tp) if attention else 1
    if attention is None or num_copies == 1:
        return kind
    num_heads = num_copies * attention.num_key_value_heads
    if attention.num_attention_heads % num_heads:  # no layout has these degrees
        return kind
    return replace(kind, grouped_query=replace(attention, num_key_value_heads=num_heads))


@lru_cache(maxsize=1024)
def adds_params(shape: ModelShape, tp: int) -> bool:
    """Whether the ranks of tp together hold more parameters than the model has."""
    return shape.vocab_size % tp != 0 or kinds_of_ranks(shape, tp) != shape.kinds


def added_params(shape: ModelShape, stage: Stage, tp: int, rows_multiple: int = ROWS_MULTIPLE) -> int:
    """Number of parameters of a stage that all ranks of tp together hold beyond those of the model:
    padding of the vocabulary to a multiple of rows_multiple * tp, and copies.
    """
    if not adds_params(shape, tp):
        return 0
    num_tables = int(stage.has_embedding) + int(stage.has_head)
    if num_tables == 2 and shape.tie_word_embeddings:
        num_tables = 1
    h, num_rows = shape.hidden_size, padded_vocab_size(shape.vocab_size, tp, rows_multiple) - shape.vocab_size
    kinds = zip(stage.num_by_kind(shape), shape.kinds, kinds_of_ranks(shape, tp), strict=True)
    copied_params = sum(num * (copied.num_params(h) - kind.num_params(h)) for num, kind, copied in kinds)
    return num_tables * num_rows * h + copied_params
