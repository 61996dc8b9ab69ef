import pytest

from tests.configs import refused
from ultrabench.errors import most_similar, require_typed_characters, unknown_name
from ultrabench.quantity import parsed_number


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("hardware.mem_bytes", "80GB", 80e9), ("hardware.mem_bytes", "80 GiB", 80 * 2**30),
        ("hardware.mem_bytes", "80Gbit", None),
        ("hardware.link_bytes_per_s", "400Gbps", 50e9), ("hardware.link_bytes_per_s", "450GB/s", 450e9),
        ("hardware.peak_flops_per_s.bf16", "989T", 989e12), ("hardware.peak_flops_per_s.bf16", "1PFLOP/s", 1e15),
        ("--tokens", "15T", 15e12), ("--tokens", "300B", 300e9), ("launcher.time_minutes", "2h", 120.0),
        ("measure.run_limit_s", "1.5min", 90.0), ("sweep.gbs", "1e3", 1000.0), ("sweep.gbs", "1k", None),
        *(("kernel.params", text, 7e6) for text in ("7m", "7M", "7e6", "7 M", "0.007b", "0.007G", "7000K")),
        ("kernel.params", "7X", None), ("kernel.flops_per_token", "7t", 7e12),
        ("sweep.gbs", "1000", None), ("sweep.gbs", "many", None), ("hardware.mem_bytes", "nan", None),
    ],
)  # fmt: skip
def test_a_number_has_the_units_of_what_its_setting_measures(name, text, number):
    assert parsed_number(text, name) == (None if number is None else pytest.approx(number))


@pytest.mark.parametrize(
    "word", ["\u201cmodel=tiny\u201d", "sweep.tp=\u201c[1,2]\u201d", "sweep.models=[\u2018a\u2019]"]
)
def test_curly_quotes_are_named(word):
    with refused("these quotes are curly; type straight ones: "):
        require_typed_characters([word])


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("sweep.tp=[1\uff0c2]", "\uff0c is a full-width character; write 'sweep.tp=[1,2]'"),
        ("sweep.tp=\uff3b1,2\uff3d", "\uff3b is a full-width character; write 'sweep.tp=[1,2]'"),
        ("\u2013top", "\u2013 is not the hyphen of an option; write --top"),
        ("\u2014top=3", "\u2014 is not the hyphen of an option; write --top=3"),
    ],
)
def test_characters_of_word_processors_and_input_methods_are_named(word, line):
    with refused(line):
        require_typed_characters([word])


def test_an_apostrophe_is_no_quote_and_a_longer_name_is_meant():
    require_typed_characters(["comment=it\u2019s", "model='tiny'"])
    assert "did you mean zero_stage?" in unknown_name("argument", "zero", ["zero_stage", "tp", "ep"])
    assert "did you mean" not in unknown_name("column", "model", ["model_flops_per_s_per_gpu"])


def test_a_number_in_a_name_is_not_taken_for_another_one():
    assert most_similar("fp4", ("fp32", "bf16", "fp8", "fp64")) is None
    assert most_similar("fp4", ("fp8", "nvfp4")) == "nvfp4"
    assert most_similar("bf16s", ("fp16", "bf16")) == "bf16"
