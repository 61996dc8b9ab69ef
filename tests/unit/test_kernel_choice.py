import pytest

from ultrabench.kernel_choice import KernelChoice


@pytest.mark.parametrize("form", ["{}", "--config={}", "train.config={}"])
def test_a_file_that_is_edited_gives_another_digest(tmp_path, form):
    file = tmp_path / "conf.yaml"
    file.write_text("lr: 1")
    kernel = KernelChoice(name="mine", kind="command", command=("python", "train", form.format(file)))
    before = kernel.digest()
    assert kernel.digest() == before
    file.write_text("lr: 2")
    assert kernel.digest() != before
