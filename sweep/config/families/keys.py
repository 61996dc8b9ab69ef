"""The keys of a config.json, each of which is read, is known to change nothing, or is refused by its name."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ultrabench.errors import ConfigError, misspelled_name
from ultrabench.sweep.config.model_types import EXTRA_ROPE_KEYS, ROPE_KEYS, TRAINED_VALUES, is_harmless

MAX_VALUE_CHARS = 60
"""Number of characters of a value in a message."""
NO_SIZES_ADVICE = "choose another model, since ultrabench knows no sizes that stand for this one"
"""What a user can do with a model that ultrabench cannot describe."""
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}  # fmt: skip
"""Name of an activation in a config.json -> its name in a shape."""
_ROTATIONS = {"su": "longrope", "mrope": "default"}
"""Other names of rotations."""


def abbreviated(value: Any) -> str:
    """A value as JSON has it; of a long one its beginning."""
    text = json.dumps(value)
    start = text[:MAX_VALUE_CHARS].rpartition(" ")[0]
    return text if len(text) <= MAX_VALUE_CHARS else f"{start} ..."


class _Kind(NamedTuple):
    """What a key may have in place of its default."""

    types: tuple[type, ...]
    noun: str


_NUMBER = _Kind((int, float), "a number")
_KINDS = {
    bool: _Kind((bool,), "true or false"), int: _NUMBER, float: _NUMBER, list: _Kind((list,), "a list"),
}  # fmt: skip
"""Type of a default -> what the value of the key must be."""


class ConfigKeys:
    """The values of a config.json of one model_type; it notes which keys were read."""

    def __init__(self, values: Mapping[str, Any], model_type: str, where: str) -> None:
        self._values, self.model_type, self.where = values, model_type, where
        self._read_keys = set[str]()

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these keys that is neither absent nor null; `default` if none is.

        Raises:
            ConfigError: the value is of another kind than the default.
        """
        self._read_keys |= {*names}
        name = next((name for name in names if self._values.get(name) is not None), None)
        if name is None:
            return default
        kind, value = _KINDS.get(type(default)), self._values[name]
        if kind and (
            not isinstance(value, kind.types) or (isinstance(value, bool) and kind.noun != "true or false")
        ):
            raise ConfigError(f"model={self.where}: {name} is {abbreviated(value)}; must be {kind.noun}")
        return value

    def size(self, *names: str) -> Any:
        """The value of a key that a file must have.

        Raises:
            ConfigError: none of the keys has a value.
        """
        if (value := self.get(*names)) is None:
            raise ConfigError(f"model={self.where} lacks {' or '.join(names)}; add it")
        return value

    def count(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """The value of a key that counts something; without a default a file must have the key.

        Raises:
            ConfigError: it is not an integer, or less than `least`.
        """
        value = self.size(*names) if default is None else self.get(*names, default=default)
        if type(value) is not int or not least <= value <= 2**30:
            rule = f"must be an integer from {least} to {2**30:,}"
            raise ConfigError(f"model={self.where}: {names[0]}={value!r}; {rule}")
        return value

    def words(self, *names: str) -> list[str]:
        """The value of a key that lists a word for each layer; empty if the file lacks it."""
        value = self.get(*names, default=[])
        if not isinstance(value, list):
            raise ConfigError(f"model={self.where}: {names[0]} is {abbreviated(value)}; must be a list")
        return [str(word) for word in value]

    def only(self, name: str, *allowed: Any) -> None:
        """Raises ConfigError if a key has another value than null and the allowed ones."""
        self._read_keys.add(name)
        value = self._values.get(name)
        if value is not None and value not in allowed:
            self.refuse(name, " or ".join(map(json.dumps, allowed)))

    def unused(self, *names: str) -> None:
        """Notes keys that change neither sizes nor work in models of this type."""
        self._read_keys |= {*names}

    def refuse(self, name: str, allowed_text: str) -> None:
        """Raises the error for a key whose value makes the model one that ultrabench cannot describe.

        Raises:
            ConfigError: always.
        """
        fact = f"model={self.where}: {name} is {abbreviated(self._values.get(name))}"
        rule = f"ultrabench knows {self.model_type} models only with {name} {allowed_text}"
        raise ConfigError(f"{fact}; {rule}", NO_SIZES_ADVICE)

    def activation(self, *names: str, default: str = "silu") -> str:
        """The activation of feed-forward blocks, by its name in a shape."""
        value = self.get(*names, default=default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            self.refuse(names[0], " or ".join(_ACTIVATIONS))
        return _ACTIVATIONS[value]

    def _of_layer(self, name: str, layer: int | None, default: float) -> Any:
        """The value of a key for a layer, where the key may list one for each; without a layer, its only value.

        Raises:
            ConfigError: the value is not a number, or the list has none for this layer.
        """
        values = self.get(name)
        if layer is None or not isinstance(values, list):
            return self.get(name, default=default)
        value = values[layer] if layer < len(values) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            fact = f"model={self.where}: {name} is {abbreviated(values)}"
            raise ConfigError(f"{fact}; must have a number for layer {layer}")
        return value

    def rotation(
        self,
        layer_type: str | None = None,
        theta: float = 10000.0,
        share: float = 1.0,
        layer: int | None = None,
    ) -> dict[str, Any]:
        """The settings of rotations, with `rope_theta`, `partial_rotary_factor` and `rope_type`.

        Args:
            layer_type: the layers that are meant, where layers have different rotations.
            theta: rope_theta of a file that lacks it.
            share: partial_rotary_factor of a file that lacks it.
            layer: the number of the layer that is meant, where rope_theta and partial_rotary_factors may list values
                of layers.
        """
        rope_values = self.get("rope_parameters", "rope_scaling") or {}
        rope_values = rope_values if isinstance(rope_values, dict) else {"rope_type": rope_values}
        if isinstance(rope_values.get(layer_type or "full_attention"), dict):
            rope_values = rope_values[layer_type or "full_attention"]
        self._require_known_rotation(rope_values)
        rope_type = rope_values.get("rope_type") or rope_values.get("type") or "default"
        if not isinstance(rope_type, str):
            raise ConfigError(f"model={self.where}: rope_type is {abbreviated(rope_type)}; must be a text")
        settings = {
            "rope_theta": self._of_layer("rope_theta", layer, theta),
            "partial_rotary_factor": self.get("partial_rotary_factor", default=share),
        }
        if layer is not None:
            settings["partial_rotary_factor"] = self._of_layer("partial_rotary_factors", layer, share)
        given_settings = {key: rope_values[key] for key in settings if rope_values.get(key) is not None}
        return {
            **rope_values,
            **settings,
            **given_settings,
            "rope_type": _ROTATIONS.get(rope_type, rope_type),
        }

    def _require_known_rotation(self, rope_values: Mapping[str, Any]) -> None:
        """Raises ConfigError for a key of rotations that may change the model."""
        for key, value in rope_values.items():
            if key not in ROPE_KEYS | EXTRA_ROPE_KEYS and value is not None:
                fact = f"model={self.where}: rope_scaling has {key} {abbreviated(value)}"
                raise ConfigError(
                    f"{fact}; ultrabench knows no such key of rotations", "remove it if it changes nothing"
                )

    def require_all_read(self) -> None:
        """Raises ConfigError for a key that nobody has read, since it may change the model."""
        for key, value in self._values.items():
            has_no_effect = key in TRAINED_VALUES and value in (TRAINED_VALUES[key], None)
            if value is None or has_no_effect or key in self._read_keys or is_harmless(key):
                continue
            fact = f"model={self.where}: {key} is {abbreviated(value)}"
            rule = f"ultrabench knows no such key of {self.model_type} models, so it may change the model"
            intended_key = misspelled_name(key, self._read_keys)
            remedy = (
                f"did you mean {intended_key}?" if intended_key else "remove the key if it changes nothing"
            )
            raise ConfigError(f"{fact}; {rule}", remedy)
