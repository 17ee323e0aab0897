"""Measuring protocol: every number that decides how a case is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

PROTOCOL_VERSION = 4
BRIEF_VERSIONS = 100  # added to the version by which brief times compare among themselves


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run until `medians` successive batch medians agree within `agreement`, in min_s … max_s."""

    min_s: float
    max_s: float
    medians: int = 3
    agreement: float = 0.005  # (largest - smallest) / smallest


@dataclass(frozen=True, slots=True)
class Protocol:
    """The numbers of one protocol version. Two times compare only under the same version.

    warm_up:            before the first placement of a device that did nothing for a second.
    rewarm:             before each other one; only its own buffers are new.
    retune:             before each candidate that is timed briefly, on buffers that are there.
    min_cache_factor:   a cold rotation's weights exceed this many times the L2 cache …
    cache_factor:       … and this many where that takes at most many_copies copies. At 4, kernels
                        that mark weights evict-first still found some of the round before: on an
                        H200 (60 MB of L2) 28672x8192 was 2 % faster at 4 than at 24.
    assumed_l2_bytes:   for a device that doesn't tell its L2.
    max_launches:       most launches, so most weight copies, in one sample.
    min_sample_us:      a sample (launches timed together) is at least this long.
    target_sample_us:   … and is filled up to this: it keeps what starting a CUDA graph costs, 2 to
                        3 us a sample, under 1 %, and the event clock's 0.5 us under 0.2 %.
    batch_s:            samples with their gaps queued between two synchronizations of the host.
    trim:               the result is the mean over placements of the means of their samples, both
                        without this fraction at each end. None: medians instead of means.
    confidence, ci_tolerance: stop when the interval of the result at this confidence lies within ±
                        this fraction of it.
    min_samples, min_device_s: over all placements, before a case may stop.
    long_device_s:      of device time stands for min_samples: a turn over many copies of small
                        weights may make a sample of a slow kernel 20 ms long.
    min_placements:     fresh allocations of all buffers.
    placement_s:        a placement ends after this long even where its own interval is wider:
                        further placements say more.
    budget_s:           of placing, warm-up and samples. Ends a case early where its placements
                        scatter so much that it would not do.
    gaps:               idle time before each sample under `boost`, in lengths of a sample; the next
                        where samples are clocked too low after the one before.
    min_clock_fraction: a sample under `boost` whose SM clock is below this fraction of the case's
                        own with the longest gaps is left out …
    min_device_clock_fraction: … or below this one of what the device runs at without load.
    sustained:          steady load before the samples of each placement under `sustained` …
    sustained_s:        … which then take this long …
    sustained_placements: … over so many placements.
    turn_s:             samples of one side, without their gaps, in an interleaved comparison.
    telemetry_period_s: between readings of clocks and power while samples are taken.
    tolerance:          of max_rel_error (see check.relative_error).
    contents:           activations that samples draw from, fewer where these are large.
    pool_share:         of the L2: most bytes of the activations that the launches of a sample
                        rotate over; two of them at least.
    floor_margin:       a cold kernel is refused whose interval lies below the time of its floor
                        without the launch, divided by this. Launches that overlap save more than
                        the launch: 1.09 was the most on an H200. Up to 1 / min_cache_factor of the
                        weights may still lie in the L2. A CPU's is wider, because other programs
                        disturb both times.
    max_overhead:       of the turns of an external kernel: time beside samples and gaps, relative
                        to the samples. It goes to messages and to what changes between samples;
                        on a CPU also to other programs.
    max_excess_overhead: part of a turn by which head's overhead may exceed base's in a gate, whose
                        turns have as many samples. In 64 honest gates on a CPU, either side taken
                        for head, the largest median was 5 %.
    rewritten_bytes:    of weight copies rewritten in place before a batch, one copy at least.
    retimes:            the configurations that are nearly the fastest in a coarse timing.
    """

    version: int
    warm_up: WarmUp
    rewarm: WarmUp
    retune: WarmUp
    min_sample_us: float
    target_sample_us: float
    batch_s: float
    contents: int
    rewritten_bytes: int
    floor_margin: float
    max_overhead: float
    max_excess_overhead: float
    ci_tolerance: float
    min_samples: int
    min_device_s: float
    long_device_s: float
    placement_s: float
    budget_s: float
    gaps: tuple[float, ...]
    sustained: WarmUp
    sustained_s: float
    trim: float | None
    min_cache_factor: float = 4.0
    cache_factor: float = 16.0
    many_copies: int = 1024
    assumed_l2_bytes: int = 1 << 20
    max_launches: int = 16384
    confidence: float = 0.95
    min_placements: int = 5
    min_clock_fraction: float = 0.97
    min_device_clock_fraction: float = 0.55
    sustained_placements: int = 3
    turn_s: float = 0.01
    telemetry_period_s: float = 0.02
    tolerance: float = 1e-3
    pool_share: float = 1 / 32
    retimes: bool = True

    def cold_bytes(self, l2_bytes: int | None, factor: float) -> int:
        """Bytes that the weight copies of a cold rotation must exceed at a cache factor."""
        return int(factor * (l2_bytes or self.assumed_l2_bytes))

    def is_enough(self, samples: int, device_s: float, *, placements: int = 1) -> bool:
        """Return True if samples and device time reach the minimum for so many placements."""
        share = placements / self.min_placements
        many = samples >= share * self.min_samples or device_s >= share * self.long_device_s
        return many and device_s >= share * self.min_device_s


PROTOCOL_CUDA = Protocol(
    version=PROTOCOL_VERSION,
    warm_up=WarmUp(min_s=0.2, max_s=1.0),
    rewarm=WarmUp(min_s=0.01, max_s=0.02),
    retune=WarmUp(min_s=0.004, max_s=0.05),
    min_sample_us=50.0,
    target_sample_us=400.0,
    batch_s=0.01,
    contents=16,
    rewritten_bytes=256 << 20,
    floor_margin=1.5,
    max_overhead=0.6,
    max_excess_overhead=0.05,
    ci_tolerance=0.0025,
    min_samples=30,
    min_device_s=0.02,
    long_device_s=0.1,
    placement_s=0.06,
    budget_s=30.0,
    gaps=(2.0, 6.0, 18.0),
    sustained=WarmUp(min_s=1.0, max_s=1.0),
    sustained_s=0.6,
    trim=0.05,
)

# A CPU proves the pipeline and is never compared with a GPU: it is shared with other programs and
# scatters by tens of percent, so it takes a fraction of the time (a case is done in about half a
# second) and calls a case noisy only where the interval is wider than the median itself or three
# seconds were not enough for ten samples. Single placements lie far apart, so the median counts.
PROTOCOL_CPU = Protocol(
    version=PROTOCOL_VERSION,
    warm_up=WarmUp(min_s=0.02, max_s=0.1, agreement=0.05),
    rewarm=WarmUp(min_s=0.002, max_s=0.02, agreement=0.05),
    retune=WarmUp(min_s=0.002, max_s=0.02, agreement=0.05),
    min_sample_us=50.0,
    target_sample_us=200.0,
    batch_s=0.01,
    contents=4,
    rewritten_bytes=1 << 20,
    floor_margin=8.0,
    max_overhead=1.0,
    max_excess_overhead=0.1,
    ci_tolerance=1.0,
    min_samples=10,
    min_device_s=0.1,
    long_device_s=3.0,
    placement_s=0.6,
    budget_s=3.0,
    gaps=(0.0,),
    sustained=WarmUp(min_s=0.05, max_s=0.05),
    sustained_s=0.05,
    trim=None,
)


def protocol_of(backend: str, *, brief: bool = False) -> Protocol:
    """Return the protocol of a backend.

    brief: right to a few percent in about a fifth of the time, for tables of hundreds of cases.
    """
    whole = PROTOCOL_CPU if backend == "cpu" else PROTOCOL_CUDA
    if not brief:
        return whole
    return replace(
        whole,
        version=BRIEF_VERSIONS + whole.version,
        rewarm=WarmUp(min_s=0.002, max_s=0.01),
        batch_s=min(whole.batch_s, 0.004),
        ci_tolerance=max(whole.ci_tolerance, 0.03),
        min_samples=9,
        min_device_s=min(whole.min_device_s, 0.003),
        placement_s=min(whole.placement_s, 0.02),
        budget_s=1.0,
        min_placements=3,
        cache_factor=6.0,
        retimes=False,
    )
