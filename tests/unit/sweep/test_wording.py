"""No decision reads our own sentences: when all of them are reworded, everything is decided as before."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import FAILURES
from tests.unit.sweep.rewording import HOSTS, RUNS, decided, decisions, state_of
from ultrabench.agent.diagnose.signatures import CAUSE_BY_NAME
from ultrabench.result import UNMEASURED, Status
from ultrabench.store.events import EndCode, Ending

RESULTS = st.tuples(
    st.sampled_from(RUNS), st.integers(0, 1), st.integers(0, 2), st.sampled_from((Status.OK, *FAILURES)),
    st.sampled_from((None, UNMEASURED, *CAUSE_BY_NAME)), st.sampled_from(HOSTS), st.sampled_from("xyz"), st.none(),
)  # fmt: skip
ENDS = st.lists(st.builds(Ending, st.just("the sweep is paused"), st.sampled_from(EndCode)), max_size=8)


def reworded(state):
    """The state with other words in every reason."""
    reword = partial(replace, reason="tout autre chose")
    attempts = {key: replace(a, result=a.result and reword(a.result)) for key, a in state.attempts.items()}
    allocations = dict(state.allocations)
    for name, allocation in allocations.items():
        ends = {start: reword(end) for start, end in allocation.ends.items()}
        allocations[name] = replace(allocation, ends=ends)
    return replace(state, attempts=attempts, allocations=allocations)


@settings(deadline=None)
@given(st.lists(RESULTS, max_size=12), ENDS)
def test_other_words_change_no_decision(results, endings):
    state = state_of(results, endings)
    assert decided(reworded(state)) == decided(state)


def decided_by_code(*changes):
    """What a process decides whose code is changed as `rewording` tells."""
    command = [sys.executable, "-m", "tests.unit.sweep.rewording", *changes]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def test_other_sentences_in_the_code_change_no_decision():
    assert decided_by_code("--reword") == decisions()


@pytest.mark.campaign  # it tests the test above, in two more interpreters
def test_a_decision_that_reads_a_sentence_of_the_agent_is_found():
    assert decided_by_code("--plant") == decisions()
    assert decided_by_code("--plant", "--reword") != decisions()
