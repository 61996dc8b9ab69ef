"""A state that grows with its journal is the state of the whole journal."""

from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import journals, lines_of
from ultrabench.store.state import Fold, fold


@given(files=journals(), data=st.data())
def test_growing_in_any_interleaving_gives_the_same(files, data):
    growing = Fold()
    left = [lines_of(events) for events in files]
    while any(left):
        pick = data.draw(st.sampled_from([n for n, events in enumerate(left) if events]))
        take = data.draw(st.integers(1, len(left[pick])))
        growing.add(left[pick][:take])
        del left[pick][:take]
    assert growing.state == fold(lines_of(event for events in files for event in events))


@given(files=journals())
def test_hearing_it_again_changes_nothing(files):
    events = lines_of(event for file in files for event in file)
    growing = Fold()
    growing.add(events)
    assert growing.add(events) == fold(events)
