"""A training program built on transformers' Trainer, which ultrabench reads by its log alone.

torchrun --nproc_per_node=2 train.py --output_dir out --max_steps 10 --logging_steps 1 --save_strategy
no --report_to none
"""

import sys
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    """The sizes of the model and of its data."""

    hidden_size: int = 64
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    vocab_size: int = 512
    seq_len: int = 64


class RandomTokens(Dataset):
    """Sequences of random tokens, as many as a Trainer asks for."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        self.vocab_size, self.seq_len = vocab_size, seq_len

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocab_size, (self.seq_len,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def main(arguments: list[str]) -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    sizes, training = parser.parse_args_into_dataclasses(arguments)
    set_seed(training.seed)
    data = RandomTokens(sizes.vocab_size, sizes.seq_len)
    config = LlamaConfig(
        hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size, vocab_size=sizes.vocab_size,
        num_hidden_layers=sizes.num_hidden_layers, num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print("number of parameters:", model.num_parameters(), flush=True)
    Trainer(model=model, args=training, train_dataset=data).train()


if __name__ == "__main__":
    main(sys.argv[1:])
