import time

import pytest

from ultrabench.errors import ConfigError
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.grid import MOST_COMBINATIONS
from ultrabench.sweep.plan import make_plan


def test_a_grid_of_millions_is_refused_with_its_size_before_it_is_enumerated():
    values = ",".join(map(str, range(1, 101)))
    wide = [f"sweep.{axis}=[{values}]" for axis in ("tp", "pp", "mbs", "gas")]
    config = load_config(["model=tiny", "sweep.nodes=[1]", "sweep.zero_stage=[0,1]", *wide])
    began = time.process_time()
    with pytest.raises(ConfigError) as refused:
        make_plan(config)
    assert time.process_time() - began < 1.0
    told = str(refused.value)
    assert told.startswith(
        f"the axes have 2,000,000 combinations; a sweep may have {MOST_COMBINATIONS:,}: narrow"
    )
    assert "sweep.tp (100 values), sweep.pp (100 values), sweep.mbs (100 values)" in told
