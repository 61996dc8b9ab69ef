import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrabench.claim import claim, owner, owner_of

KEY = "aaaa.0.0"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


@given(held=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_the_owner_is_read_as_it_was_written(tmp_path_factory, held):
    claims = tmp_path_factory.mktemp("claims")
    assert claim(claims, KEY, held)
    assert owner(claims, KEY) == held


def test_a_requeued_job_knows_its_earlier_start(tmp_path):
    first = {"allocation": "n1-x.3", "host": "gpu01", "job": {"job_id": "57_3", "restart": 0}}
    again = {**first, "host": "gpu02", "job": {"job_id": "57_3", "restart": 1}}
    assert claim(tmp_path, KEY, first)
    assert not claim(tmp_path, KEY, again)
    assert owner(tmp_path, KEY)["job"] == {"job_id": "57_3", "restart": 0}
    assert owner_of(tmp_path, KEY) == "n1-x.3"


def test_nobody_is_told_from_somebody_unreadable(tmp_path):
    assert owner(tmp_path, KEY) is None
    (tmp_path / KEY).write_text("")
    assert owner(tmp_path, KEY) == {}


@pytest.mark.parametrize("content", [b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b'{"a": 1'])
def test_what_cannot_be_read_is_empty(tmp_path, content):
    (tmp_path / KEY).write_bytes(content)
    assert owner(tmp_path, KEY) == {}
    assert owner_of(tmp_path, KEY) == "unreadable"


def test_a_folder_in_the_place_of_a_claim_is_somebody(tmp_path):
    (tmp_path / KEY).mkdir()
    assert owner(tmp_path, KEY) == {}
    assert not claim(tmp_path, KEY, {"allocation": "mine"})


@pytest.mark.parametrize("name", [None, 7, "", ["a"]])
def test_an_odd_name_is_no_allocation_of_ours(tmp_path, name):
    claim(tmp_path, KEY, {"allocation": name})
    assert owner_of(tmp_path, KEY) == str(name)
