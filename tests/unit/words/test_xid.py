"""What lines with Xids say about a GPU, by NVIDIA's catalogue."""

import pytest

from ultrabench.xid import APPLICATION_XIDS, FATAL_XIDS, LINK_XIDS, MEMORY_XIDS, XidClass, xid_of

FATAL, APPLICATION, INFORMATIONAL = XidClass.FATAL, XidClass.APPLICATION, XidClass.INFORMATIONAL


@pytest.mark.parametrize(
    ("line", "number", "xid_class"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.", 79, FATAL),
        ("[ 12.3] NVRM: Xid (PCI:0000:3b:00): 48, DBE (double bit error) at location 0", 48, FATAL),
        ("NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120", 31, APPLICATION),
        ("NVRM: Xid (PCI:0000:dc:00): 43, pid=1, Ch 00000008", 43, APPLICATION),
        ("NVRM: Xid (PCI:0000:dc:00): 63, pid=1, Row Remapper", 63, INFORMATIONAL),
        ("NVRM: Xid (PCI:0000:dc:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00", 149, FATAL),
        ("NVRM: Xid (PCI:0000:dc:00): 145, RLW_REMAP Nonfatal XC1 i0 Link 09", 145, APPLICATION),
        ("NVRM: Xid (PCI:0000:dc:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            154, FATAL),
        ("NVRM: Xid (PCI:0000:dc:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
            154,
         INFORMATIONAL),
        ("[gpu-health] CRITICAL xid: 95", 95, FATAL),
        ("XID error 119 on GPU 3", 119, FATAL),
        ("Xid 999 (a later driver)", None, None), ("checked for Xid 79: none", None, None), ("exid: 79", None, None),
        ("no events", None, None),
    ],
)  # fmt: skip
def test_the_number_and_the_class_of_a_line(line, number, xid_class):
    xid = xid_of(line)
    assert (xid and xid.number, xid and xid.xid_class) == (number, xid_class)


def test_each_number_has_one_class():
    assert MEMORY_XIDS < FATAL_XIDS
    assert not FATAL_XIDS & APPLICATION_XIDS
    assert not LINK_XIDS & (FATAL_XIDS | APPLICATION_XIDS)
    assert xid_of("NVRM: Xid (PCI:0000:dc:00): 94, Contained").is_memory_error
