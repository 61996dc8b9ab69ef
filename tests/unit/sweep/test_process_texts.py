"""Texts that no process can take are refused when a sweep is planned: by name, in one line, without their value."""

import pytest

from tests.configs import write_config
from ultrabench.cli import main as cli
from ultrabench.errors import ConfigError
from ultrabench.process_text import MAX_TOTAL_BYTES, MAX_WORD_BYTES
from ultrabench.sweep.config.load import config_from_tree, load_config
from ultrabench.sweep.plan import make_plan

TREE = load_config([
    "model=tiny", "kernel=command", 'kernel.command=[python,train.py,"{word}"]', "+sweep.words={word:[1]}",
    "launcher=slurm",
]).resolved  # fmt: skip
TEXTS = {
    "NUL": "secret\0",
    "surrogate": "secret\udcff",
    "half pair": "secret\ud800",
    "long": "secret" * 30_000,
}
SETTINGS = {
    "kernel.env.A": lambda text: {"A": text}, "sweep.env.A": lambda text: {"A": [text, None]},
    "kernel.command": lambda text: ["python", text, "{word}"], "sweep.words.word": lambda text: {"word": [1, text]},
    "sweep.flags.f.on": lambda text: {"f": {"on": [text], "off": []}},
    "kernel.flags.tp.1": lambda text: {"tp": {"1": [text]}}, "launcher.python": lambda text: ["python", text],
    "launcher.setup": lambda text: [text], "launcher.srun": lambda text: [text],
    "launcher.sbatch.comment": lambda text: {"comment": text}, "launcher.partition": lambda text: text,
    "sweep.container": lambda text: ["a", text], "sweep.python": lambda text: ["a", text],
    "launcher.environment": lambda text: [text],
}  # fmt: skip


def with_setting(setting, value):
    """TREE in which the setting that begins like this has another value."""
    group, name = setting.split(".")[:2]
    return TREE | {group: TREE[group] | {name: value}}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_text_that_no_process_can_take_is_refused_by_name_and_not_shown(setting, kind):
    with pytest.raises(ConfigError) as caught:
        config_from_tree(with_setting(setting, SETTINGS[setting](TEXTS[kind])))
    message = str(caught.value)
    assert message.startswith(setting)
    assert "secret" not in message
    assert len(message) < 250
    assert "\n" not in message


@pytest.mark.parametrize("name", ["", "=", "A=B", "A\0", "A\udcff"])
def test_a_name_that_no_variable_can_have_is_refused(name):
    with pytest.raises(ConfigError, match=r"^kernel\.env"):
        config_from_tree(with_setting("kernel.env", {name: "1"}))


def test_the_longest_word_and_variable_of_linux_are_taken():
    command = ["python", "x" * MAX_WORD_BYTES, "{word}"]
    config_from_tree(with_setting("kernel.command", command))
    config_from_tree(with_setting("kernel.env", {"AB": "\u00e9" * ((MAX_WORD_BYTES - 3) // 2)}))
    with pytest.raises(
        ConfigError, match=r"kernel\.env\.AB has 131,072 bytes; .* at most 131,071 with the name"
    ):
        config_from_tree(with_setting("kernel.env", {"AB": "x" * (MAX_WORD_BYTES - 2)}))


@pytest.mark.parametrize(
    ("setting", "value", "fact"),
    [
        ("kernel.command", ["python", *["{word}" + "x" * 100_000] * 11], "has 1,100,0"),
        ("kernel.env", {f"A{n}": "x" * 100_000 for n in range(11)}, "has 1,100,"),
        ("sweep.words", {"word": [1, "w" * 100_000]}, "kernel.command has 200,0"),
    ],
)
def test_a_command_that_is_too_long_once_its_words_are_filled_in_is_refused(setting, value, fact):
    tree = with_setting(setting, value)
    if setting == "sweep.words":
        tree = tree | {"kernel": tree["kernel"] | {"command": ["python", "{word}{word}"]}}
    with pytest.raises(ConfigError, match=r"kernel\.command") as caught:
        make_plan(config_from_tree(tree))
    assert fact in str(caught.value)
    assert MAX_TOTAL_BYTES == 1_048_576


def test_the_command_line_says_so_in_one_line_with_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_config("kernel/odd", 'kind: command\ncommand: [python, train.py]\nenv: {TOKEN: "a\\0b"}\n')
    for word in ("kernel=odd", "+kernel.env.TOKEN=\udcff", "+kernel.env.TOKEN=" + "x" * 140_000):
        monkeypatch.setattr("sys.argv", ["ultrabench", "sweep", "plan", word])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        [error_line] = capsys.readouterr().err.splitlines()
        assert exit_info.value.code == 2
        assert "kernel.env.TOKEN " in error_line


def test_more_than_a_thousand_repeats_are_refused():
    assert load_config(["repeats=1000"]).repeats == 1000
    with pytest.raises(ConfigError, match="repeats=1001; must be 1 to 1,000"):
        load_config(["repeats=1001"])
