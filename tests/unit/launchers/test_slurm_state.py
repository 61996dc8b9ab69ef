import pytest

from ultrabench.launchers.slurm.states import Outlook, Phase, job_state, pending_reason, pending_remedy
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
    "drained or reserved": ["ReqNodeNotAvail, UnavailableNodes:gpu[03,07]",
        "ReqNodeNotAvail, May be reserved for other job",
                            "(ReqNodeNotAvail)"],
    "too few nodes are up": [
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
        "(Nodes_required_for_job_are_DOWN,_DRAINED,_REBOOTING_or_reserved_for_jobs_in_higher_priority_partitions)",
    ],
    "other jobs end": ["AssocGrpGRES", "AssocMaxJobsLimit", "AssocGrpGRESRunMinutes", "QOSMaxJobsPerUserLimit",
                       "QOSMaxNodePerUserLimit", "QOSMaxGRESPerUser", "QOSGrpNodeLimit", "QOSGrpCPURunMinutesLimit",
                       "MaxGRESPerAccount", "MaxCpuRunMinsPerUser", "Licenses", "MpiPortsBusy"],
    "wait until some end": ["AssocGrpSubmitJobsLimit", "QOSMaxSubmitJobPerUserLimit", "MaxSubmitJobsPerAccount"],
    "does not know this reason": ["SomethingNew", "Something new, with words"],
    "launcher.sbatch.constraint=": ["BadConstraints"],
    "launcher.sbatch.reservation=": ["ReservationDeleted", "Reservation weekend was deleted"],
    "cancel it": ["DependencyNeverSatisfied"],
}  # fmt: skip
CLEARS = [
    "None", "", "(null)", "N/A", "Priority", "(Priority)", "Resources", "Dependency", "Reservation",
    "JobArrayTaskLimit", "BeginTime",
    "SchedDefer", "Prolog", "Cleaning",
]  # fmt: skip


@pytest.mark.parametrize(("reason", "says"), [(r, says) for says in REMEDIES for r in REMEDIES[says]])
def test_a_reason_that_needs_somebody_has_a_line(reason, says):
    assert says in (pending_remedy(reason) or "")


@pytest.mark.parametrize("reason", CLEARS)
def test_a_reason_as_in_every_queue_has_none(reason):
    assert pending_remedy(reason) is None


RESOURCES = ("BB", "Billing", "Cpu", "CPU", "Energy", "GRES", "License", "Mem", "Memory", "Node", "Unknown")
FAMILIES = (
    "AssocGrp{}", "AssocGrp{}Limit", "AssocGrp{}Minutes", "AssocGrp{}RunMinutes", "AssocMax{}PerJob",
    "AssocMax{}PerNode",
    "AssocMax{}MinutesPerJob", "QOSGrp{}", "QOSGrp{}Limit", "QOSGrp{}Minutes", "QOSGrp{}RunMinutes", "QOSMax{}PerJob",
    "QOSMax{}PerJobLimit", "QOSMax{}PerNode", "QOSMax{}PerUser", "QOSMax{}MinutesPerJob", "QOSMin{}", "Max{}PerAccount",
    "Max{}RunMinsPerAccount", "Max{}RunMinsPerUser",
)  # fmt: skip
SINGLE_CODES = [
    "AccountNotAllowed",
    "AccountingPolicy",
    "AssocGrpJobsLimit",
    "AssocGrpSubmitJobsLimit",
    "AssocGrpWallLimit",
    "AssocMaxJobsLimit",
    "AssocMaxSubmitJobLimit",
    "AssocMaxWallDurationPerJobLimit",
    "AssociationJobLimit",
    "AssociationResourceLimit",
    "AssociationTimeLimit",
    "BadConstraints",
    "BeginTime",
    "BlockFreeAction",
    "BlockMaxError",
    "BurstBufferOperation",
    "BurstBufferResources",
    "BurstBufferStageIn",
    "Cleaning",
    "Constraints",
    "DeadLine",
    "Dependency",
    "DependencyNeverSatisfied",
    "FedJobLock",
    "FrontEndDown",
    "InactiveLimit",
    "InvalidAccount",
    "InvalidQOS",
    "JobArrayTaskLimit",
    "JobHeldAdmin",
    "JobHeldUser",
    "JobHoldMaxRequeue",
    "JobLaunchFailure",
    "Licenses",
    "MaxJobsPerAccount",
    "MaxMemPerLimit",
    "MaxPoweredUpNodes",
    "MaxSubmitJobsPerAccount",
    "MpiPortsBusy",
    "NodeDown",
    "NonZeroExitCode",
    "None",
    "NvidiaImexChannels",
    "OutOfMemory",
    "PartitionConfig",
    "PartitionDown",
    "PartitionInactive",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "PowerNotAvail",
    "PowerReserved",
    "Priority",
    "Prolog",
    "QOSGrpJobsLimit",
    "QOSGrpSubmitJobsLimit",
    "QOSGrpWallLimit",
    "QOSJobLimit",
    "QOSMaxJobsPerUserLimit",
    "QOSMaxSubmitJobPerUserLimit",
    "QOSMaxWallDurationPerJobLimit",
    "QOSMinCpuNotSatisfied",
    "QOSNotAllowed",
    "QOSResourceLimit",
    "QOSTimeLimit",
    "QOSUsageThreshold",
    "RaisedSignal",
    "ReqNodeNotAvail",
    "Reservation",
    "ReservationDeleted",
    "ReservationInvalid",
    "Resources",
    "SchedDefer",
    "SystemFailure",
    "TimeLimit",
]
SENTENCES = (
    "launch failed requeued held", "Reservation weekend was deleted", "Burst buffer pre_run error",
    "burst_buffer/lua: Stage-out in progress", "Job's account not permitted to use this partition (big allows a not b)",
    "Job's QOS not permitted to use this partition (big denies a including b)", "RaisedSignal:53(Real-time_signal_19)",
    "Job is at or exceeds QOS long's group max TRES(cpu) minutes of 100 with 99",
    "current node constraints not satisfied",
    "Job is at or exceeds association (acc=a/user=b/part=(null)) group wall limit 60 with 59",
)  # fmt: skip


def test_no_reason_of_slurm_22_to_25_is_unknown():
    codes = [family.format(resource) for family in FAMILIES for resource in RESOURCES]
    unknown = [reason for reason in (*codes, *SINGLE_CODES, *SENTENCES) if pending_reason(reason) is None]
    assert not unknown


@pytest.mark.parametrize(
    ("reason", "outlook"),
    [("Priority", Outlook.USUAL), ("PartitionDown", Outlook.PASSES), ("AssocGrpSubmitJobsLimit", Outlook.PASSES),
     ("QOSGrpNodeLimit", Outlook.PASSES), ("AssocMaxJobsLimit", Outlook.PASSES),
     ("QOSMaxNodePerJobLimit", Outlook.STAYS),
     ("AssocMaxWallDurationPerJobLimit", Outlook.STAYS), ("QOSMinGRES", Outlook.STAYS),
     ("MaxNodePerAccount", Outlook.PASSES)],
)  # fmt: skip
def test_limits_that_are_shared_pass_and_those_of_one_job_stay(reason, outlook):
    assert pending_reason(reason).outlook is outlook
