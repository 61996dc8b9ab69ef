"""The accounts and QOS that this user may name, by sacctmgr."""

import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ultrabench.launchers.doctor.check import Check, failed, passed, warned
from ultrabench.launchers.slurm.command import CommandError
from ultrabench.launchers.slurm.partition import Ask, ask_controller

_COLUMNS = ("Account", "Partition", "QOS", "DefaultQOS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """One account of this user's."""

    account: str
    partition: str
    """Empty: all of them."""
    qos: tuple[str, ...]
    default_qos: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """What Slurm knows of this user."""

    user: str
    enforced: frozenset[str]
    """What it holds jobs against: associations, limits, qos, ...; empty: it takes any name."""
    default: str | None = None
    """The account of jobs that name none."""
    mine: tuple[Association, ...] = ()
    error: str | None = None
    """Why sacctmgr did not tell."""

    def usable(self, partition: str) -> list[Association]:
        """Those that hold for a partition."""
        return [a for a in self.mine if a.partition in ("", partition)]

    def needed(self, partition: str) -> str | None:
        """The account that jobs there have to name; None where they need not name one."""
        names = [a.account for a in self.usable(partition)]
        if not self.enforced or not names or self.default in names:
            return None
        return names[0]


def read_accounts(ask: Ask) -> Accounts:
    """The associations of this user on this cluster.

    Raises:
        ClusterError: slurmctld does not answer.
    """
    text = ask_controller(ask, "scontrol", "show", "config")
    config = dict(re.findall(r"^(\w+) *= *(.*?) *$", text, re.MULTILINE))
    words = set(re.split(r"[, ]+", config.get("AccountingStorageEnforce", "").lower()))
    # Each of those implies that jobs need an association (slurm.conf(5)).
    enforced = frozenset(words & {"all", "associations", "limits", "qos", "safe", "wckeys"})
    user = _user()
    begin = ("sacctmgr", "--noheader", "--parsable2", "show")
    where = ("where", f"user={user}", f"cluster={config.get('ClusterName', '')}")
    try:
        table = ask(*begin, "assoc", *where, f"format={','.join(_COLUMNS)}")
        default = ask(*begin, "user", "where", f"name={user}", "format=DefaultAccount").strip()
    except CommandError as error:
        return Accounts(user=user, enforced=enforced, error=str(error))
    rows = [fields for line in table.splitlines() if len(fields := line.split("|")) == len(_COLUMNS)]
    mine = [
        Association(
            account=row[0], partition=row[1], qos=tuple(filter(None, row[2].split(","))), default_qos=row[3]
        )
        for row in rows
    ]
    return Accounts(user=user, enforced=enforced, default=default or None, mine=tuple(mine))


def check_accounts(accounts: Accounts, partition: str, account: str | None, qos: str | None) -> Check:
    """Whether jobs of this account and QOS are taken in a partition; None stands for the default."""
    usable = accounts.usable(partition)
    rule = (
        f"Slurm enforces {', '.join(sorted(accounts.enforced))}" if accounts.enforced else "not enforced here"
    )
    if accounts.error:
        told = f"{accounts.error}; {rule}"
        if not accounts.enforced:
            return passed("account", told)
        return warned(
            "account", told, "ask the site for your account, and set launcher.account= if jobs are refused"
        )
    names = list(dict.fromkeys(a.account for a in usable))
    told = (
        f"user {accounts.user}: {_list(names) or 'no account'}; default {accounts.default or 'none'}; {rule}"
    )
    if not accounts.enforced:
        return passed("account", told)
    wanted = account or accounts.default
    if not names:
        return failed("account", told, f"ask the site for an account that may use partition {partition}")
    chosen = [a for a in usable if a.account.lower() == (wanted or "").lower()]
    if not chosen:
        given = f"launcher.account={account}" if account else f"default {wanted or 'none'}"
        return failed("account", f"{given}; {told}", f"set launcher.account= to one of {_list(names)}")
    known = list(dict.fromkeys(q for a in chosen for q in a.qos))
    if qos and accounts.enforced & {"qos", "all"} and qos not in known:
        told = f"launcher.qos={qos}; account {wanted} has QOS {_list(known) or 'none'}; {rule}"
        return failed(
            "account", told, f"set launcher.qos= to one of {_list(known) or '(none: leave it out)'}"
        )
    return passed("account", f"{told}; QOS {_list(known) or 'none'}")


def _list(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
