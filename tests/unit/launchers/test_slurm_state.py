import pytest

from ultrabench.launchers.slurm.states import Phase, job_state, pending_remedy
from ultrabench.result import Status

QUEUED, RUNNING, HELD, OVER = Phase.QUEUED, Phase.RUNNING, Phase.HELD, Phase.OVER
STATES = {
    (QUEUED, None): ["PENDING", "REQUEUE_FED", "EXPEDITING"],
    (HELD, None): ["REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"],
    (RUNNING, None): ["RUNNING", " running ", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING",
                      "RESIZING", "STAGE_OUT", "REQUEUED", "POWER_UP_NODE", "UPDATE_DB"],
    (OVER, Status.LOST): ["COMPLETED", "FAILED"],
    (OVER, Status.OOM): ["OUT_OF_MEMORY"],
    (OVER, Status.PREEMPTED): ["PREEMPTED"],
    (OVER, Status.CANCELLED): ["CANCELLED", "CANCELLED by 1000", "CANCELLED+", "cancelled by 0", "TIMEOUT", "DEADLINE",
                               "REVOKED"],
    (OVER, Status.NODE_FAIL): ["NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"],
}  # fmt: skip


@pytest.mark.parametrize(("state", "kind"), [(state, kind) for kind in STATES for state in STATES[kind]])
def test_every_state_has_a_phase_and_the_status_of_what_it_left(state, kind):
    meaning = job_state(state)
    assert (meaning.phase, meaning.status) == kind
    assert "not known" not in meaning.note


@pytest.mark.parametrize(("state", "shown"), [("COMPLET+", "COMPLET+"), ("  ", "(none)"), ("?", "?")])
def test_an_unknown_state_may_still_hold_nodes(state, shown):
    assert job_state(state) == (RUNNING, f"is in state {shown}, which ultrabench does not know", None, False)


REMEDIES = {
    "scontrol release": ["JobHeldUser", "job requeued in held state"],
    "failed start": ["launch failed requeued held", "(launch_failed_requeued_held)", "JobHoldMaxRequeue",
                     "user env retrieval failed requeued held"],
    "`scontrol requeuehold`": ["job requeued in held state", "(job_requeued_in_held_state)"],
    "administrators": ["(JobHeldAdmin)"],
    "launcher.partition=": ["PartitionDown", "PartitionInactive", "PartitionConfig"],
    "launcher.max_nodes=": ["PartitionNodeLimit", "QOSMaxNodePerJobLimit", "ReqNodeNotAvail"],
    "launcher.time_minutes=": ["PartitionTimeLimit", "AssocMaxWallDurationPerJobLimit",
                               "QOSMaxWallDurationPerJobLimit", "QOSMaxGRESMinutesPerJob"],
    "launcher.account=": ["AssocMaxNodePerJobLimit", "AssocGrpCPUMinutesLimit", "AssocGrpBillingMinutes",
                          "InvalidAccount", "AccountNotAllowed"],
    "launcher.qos=": ["QOSMaxGRESPerJob", "AssocMaxGRESPerNode", "QOSMinGRES", "QOSUsageThreshold", "InvalidQOS",
                      "QOSNotAllowed"],
    "used up": ["QOSGrpWallLimit"],
    "launcher.mem=": ["MaxMemPerLimit"],
    "maintenance": ["ReqNodeNotAvail, Reserved for maintenance"],
    "down or reserved": ["ReqNodeNotAvail, UnavailableNodes:gpu[03,07]"],
    "launcher.sbatch.constraint=": ["BadConstraints"],
    "launcher.sbatch.reservation=": ["ReservationDeleted", "Reservation weekend was deleted"],
    "cancel it": ["DependencyNeverSatisfied"],
}  # fmt: skip
CLEARS = [
    "None", "", "(null)", "Priority", "Resources", "Dependency", "Reservation", "JobArrayTaskLimit", "AssocGrpGRES",
    "AssocMaxJobsLimit", "AssocGrpGRESRunMinutes", "QOSMaxJobsPerUserLimit", "QOSMaxNodePerUserLimit",
    "QOSMaxGRESPerUser", "QOSGrpNodeLimit", "QOSGrpCPURunMinutesLimit", "MaxGRESPerAccount", "SomethingNew",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
]  # fmt: skip


@pytest.mark.parametrize(("reason", "says"), [(r, says) for says in REMEDIES for r in REMEDIES[says]])
def test_a_reason_that_stays_has_a_remedy(reason, says):
    assert says in (pending_remedy(reason) or "")


@pytest.mark.parametrize("reason", CLEARS)
def test_a_reason_that_clears_has_none(reason):
    assert pending_remedy(reason) is None
