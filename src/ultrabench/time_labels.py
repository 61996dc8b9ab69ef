"""Labels of times that are not those of a whole step, in logs and in the headers of tables."""

import re

PARTS_OF_STEP = (
    r"forward|fwd|backward|bwd|data[ _-]?load\w*|dataloader|data[ _-](?:time|wait)|optimi[sz]er(?![ _-]step)|opt"
    r"|all[ _-]?reduce|all[ _-]?gather|reduce[ _-]?scatter|comm(?:unication)?|grad(?:ient)?[ _-]sync|checkpoint|saving"
)
"""Labels of parts of a step, and of work between steps, as a part of a regular expression."""
OTHER_TIMES = r"eta|remaining|time[ _-]left|epoch[ _-]time|epoch[ _-]took"
"""Labels of times of many steps, as a part of a regular expression."""
_OTHER_TIME = re.compile(rf"(?<![a-z])(?:{PARTS_OF_STEP}|{OTHER_TIMES})(?![a-z])", re.IGNORECASE)
_WHOLE_STEP = re.compile(
    r"(?<![a-z])(?:(?:forward|fwd).*(?:backward|bwd)"
    r"|(?:incl|including|excl|excluding|with|without)(?![a-z])|w/o)",
    re.IGNORECASE,
)
"""Words with which a label of a part does not name this part alone."""
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")


def other_time_in(header: str) -> str | None:
    """The words in a header that name a part of a step or the time of many steps; None if it names a whole step."""
    text = _CAMEL_CASE.sub("_", header)
    label = _OTHER_TIME.search(text)
    return label[0] if label and not _WHOLE_STEP.search(text) else None
