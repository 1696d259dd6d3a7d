"""Numbers that the CAPSlog paper prints, by figure; None where it draws a number but does not print it."""

from __future__ import annotations

__all__ = ["CONFIGURATIONS", "FIGURE_10", "FIGURE_12", "GPUS", "MEMORY_BYTES", "OUT_OF_MEMORY", "PEAKS", "REDUCTIONS"]

GPUS = 8
MEMORY_BYTES = 16 << 30  # NVIDIA RTX A4000, Sec. IV-A

CONFIGURATIONS = {
    # name: (cut points, parameters) of Fig. 7 (the text calls it Table 7)
    "RN50-E6": (24, "41M"),
    "RN50-D-E6": (24, "41M"),
    "RN101-E6": (41, "60M"),
    "RN101-D-E6": (41, "60M"),
    "RN101-E12": (47, "68M"),
    "RN101-D-E12": (47, "68M"),
}

PEAKS = {"RN50-D-E6": {"varuna": 13.3, "capslog": 6.2}}  # GB, Sec. IV-B and Fig. 8
OUT_OF_MEMORY = ("RN101-D-E6", "RN101-D-E12")  # with Varuna's partitioning, Fig. 9
REDUCTIONS = (22.3, 53.2)  # percent, least and most of all configurations, Sec. IV-B
FIGURE_10 = (1.24, 2.82)  # throughput of CAPSlog over Varuna, least and most, Sec. IV-C

FIGURE_12 = {
    # name: (mCAP's runs, end-to-end; CAPSlog's runs, mean run, end-to-end), as h:mm:ss
    "RN50-E6": (25, "0:29:56", 8, "0:00:39", "0:12:28"),
    "RN50-D-E6": (25, "out of memory", 8, "0:00:50", "0:12:30"),
    "RN101-E6": (42, "1:01:10", 15, "0:00:39", "0:21:00"),
    "RN101-D-E6": (42, "out of memory", 15, "0:00:45", "0:22:28"),
    "RN101-E12": (48, "1:05:46", 16, "0:00:39", "0:22:03"),
    "RN101-D-E12": (48, "out of memory", 16, "0:00:51", "0:25:37"),
}
