"""What tensor parallelism adds to a model whose vocabulary or key/value heads its ranks cannot divide.

Ranks of tp hold equal parts, so that the vocabulary is padded with rows that are no tokens, and a key/value head is
copied to several ranks.
"""

from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage

ROWS_MULTIPLE = 128
"""Number that divides the rows of a padded vocabulary on each rank, so that they suit the tensor cores of GPUs.

It is the default of Megatron-LM, where --make-vocab-size-divisible-by times tp divides the padded vocabulary.
"""

KV_COPIES_WORD = "kv_copies"
"""The word of a command, and of kernel.supports, for the ranks of tp that hold the same key/value head."""


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Number of rows of the embedding, or of the head, on all ranks of tp together.

    It is `vocab_size` if tp divides that, else the next multiple of ROWS_MULTIPLE * tp, to which Megatron-LM pads any
    vocabulary.
    """
    if vocab_size % tp == 0:
        return vocab_size
    multiple = ROWS_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def kv_copies(num_key_value_heads: int, tp: int) -> int:
    """Number of neighbouring ranks of tp that hold the same key/value head; 1 unless there are more ranks than heads."""
    return max(1, tp // num_key_value_heads)


def kv_width_of_ranks(shape: ModelShape, tp: int) -> int:
    """Width of the key heads of a layer on all ranks of tp together, and of the value heads, with their copies."""
    return shape.kv_width * kv_copies(shape.num_key_value_heads, tp)


def adds_params(shape: ModelShape, tp: int) -> bool:
    """Whether the ranks of tp together hold more parameters than the model has."""
    return kv_copies(shape.num_key_value_heads, tp) > 1 or shape.vocab_size % tp != 0


def added_params(shape: ModelShape, stage: Stage, tp: int) -> int:
    """Number of parameters of a stage that all ranks of tp together hold beyond those of the model: padding and copies."""
    num_tables = int(stage.has_embedding) + int(stage.has_head)
    if num_tables == 2 and shape.tie_word_embeddings:
        num_tables = 1
    num_rows = padded_vocab_size(shape.vocab_size, tp) - shape.vocab_size
    added_kv_width = kv_width_of_ranks(shape, tp) - shape.kv_width
    layer_params = 2 * added_kv_width * (shape.hidden_size + shape.attention_bias)
    return num_tables * num_rows * shape.hidden_size + stage.num_layers * layer_params
