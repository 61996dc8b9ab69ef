import pytest

from ultrabench.launchers.slurm.states import Phase, meaning, pending_remedy
from ultrabench.result import Status

QUEUED, RUNNING, HELD, OVER = Phase.QUEUED, Phase.RUNNING, Phase.HELD, Phase.OVER


@pytest.mark.parametrize(
    ("words", "phase", "status"),
    [
        ("PENDING", QUEUED, None), ("REQUEUE_FED EXPEDITING", QUEUED, None),
        ("REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD", HELD, None),
        ("RUNNING CONFIGURING COMPLETING SUSPENDED STOPPED", RUNNING, None),
        ("SIGNALING RESIZING STAGE_OUT REQUEUED POWER_UP_NODE UPDATE_DB", RUNNING, None),
        ("COMPLETED FAILED", OVER, Status.LOST), ("OUT_OF_MEMORY", OVER, Status.OOM),
        ("CANCELLED TIMEOUT DEADLINE REVOKED", OVER, Status.CANCELLED), ("PREEMPTED", OVER, Status.PREEMPTED),
        ("NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL", OVER, Status.NODE_FAIL),
    ],
)  # fmt: skip
def test_every_state_has_a_phase_and_the_status_of_what_it_left(words, phase, status):
    for word in words.split():
        told = meaning(word)
        assert (told.phase, told.status) == (phase, status), word
        assert told.note


@pytest.mark.parametrize(
    ("word", "same"),
    [
        ("CANCELLED by 1000", "CANCELLED"),
        ("CANCELLED+", "CANCELLED"),
        ("cancelled by 0", "CANCELLED"),
        (" running ", "RUNNING"),
    ],
)
def test_a_state_is_understood_however_it_is_written(word, same):
    assert meaning(word) == meaning(same)


@pytest.mark.parametrize("word", ["HIBERNATING", "COMPLET+", "+", "", "  ", "?"])
def test_an_unknown_state_may_still_hold_nodes(word):
    told = meaning(word)
    assert (told.phase, told.status) == (RUNNING, None)
    assert (word.strip() or "(none)") in told.note


REMEDIES = {
    "scontrol release": ["JobHeldUser", "launch failed requeued held", "(launch_failed_requeued_held)",
                         "job requeued in held state", "JobHoldMaxRequeue"],
    "administrators": ["(JobHeldAdmin)"],
    "launcher.partition=": ["PartitionDown", "PartitionInactive", "PartitionConfig"],
    "launcher.max_nodes=": ["PartitionNodeLimit", "QOSMaxNodePerJobLimit", "ReqNodeNotAvail"],
    "launcher.time_minutes=": ["PartitionTimeLimit", "AssocMaxWallDurationPerJobLimit",
                               "QOSMaxWallDurationPerJobLimit", "QOSMaxGRESMinutesPerJob"],
    "launcher.account=": ["AssocMaxNodePerJobLimit", "AssocGrpCPUMinutesLimit", "AssocGrpBillingMinutes",
                          "InvalidAccount", "AccountNotAllowed"],
    "launcher.qos=": ["QOSMaxGRESPerJob", "AssocMaxGRESPerNode", "QOSMinGRES", "QOSMinCpuNotSatisfied",
                      "QOSUsageThreshold", "InvalidQOS", "QOSNotAllowed"],
    "used up": ["QOSGrpWallLimit"],
    "launcher.mem=": ["MaxMemPerLimit"],
    "maintenance": ["ReqNodeNotAvail, Reserved for maintenance"],
    "down or reserved": ["ReqNodeNotAvail, UnavailableNodes:gpu[03,07]"],
    "launcher.sbatch.constraint=": ["BadConstraints"],
    "launcher.sbatch.reservation=": ["ReservationDeleted", "Reservation weekend was deleted"],
    "cancel it": ["DependencyNeverSatisfied"],
}  # fmt: skip


@pytest.mark.parametrize(("reason", "says"), [(r, says) for says in REMEDIES for r in REMEDIES[says]])
def test_a_reason_that_stays_has_a_remedy(reason, says):
    remedy = pending_remedy(reason)
    assert remedy is not None
    assert says in remedy
    assert "\n" not in remedy


@pytest.mark.parametrize(
    "reason",
    [
        "None", "", "(null)", "Priority", "Resources", "Dependency", "BeginTime", "Reservation", "Licenses", "Prolog",
        "Cleaning", "JobArrayTaskLimit", "AssociationJobLimit", "AssocMaxJobsLimit", "AssocGrpJobsLimit",
        "AssocGrpGRES", "AssocGrpGRESRunMinutes", "QOSJobLimit", "QOSMaxJobsPerUserLimit", "QOSMaxNodePerUserLimit",
        "QOSMaxGRESPerUser", "QOSMaxSubmitJobPerUserLimit", "QOSGrpNodeLimit", "QOSGrpCPURunMinutesLimit",
        "MaxGRESPerAccount", "MaxJobsPerAccount", "WaitingForScheduling", "SomethingNew",
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    ],
)  # fmt: skip
def test_a_reason_that_clears_has_none(reason):
    assert pending_remedy(reason) is None
