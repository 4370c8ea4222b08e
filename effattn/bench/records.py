"""The records of a study: ``records.jsonl``, one JSON object a line and cell, appended by one process.

A line is on the disk before the next cell begins. A process that was killed while it wrote leaves at most a
torn last line, which is cut off when the file is next opened for writing. A cell that was measured again
has two lines, of which the later one counts.

The fields of a record; what was not measured is absent or null, never 0:

* identity: study, cell (its key), backend (canonical spec), backend_name, backend_source (of a backend from elsewhere:
  a digest of its file), batch_size, num_heads, num_kv_heads,
  seq_len, head_dim, dtype, device, mask, input, pass ("forward", "forward_backward" or "decode"), seed;
* outcome: status ("ok", "unsupported", "out_of_memory", "crashed", "timeout" or "error"), reason, impl (what ran),
  input_description;
* time in ms: setup_ms (the first call with all that it sets up), compile_ms (what torch.compile took of that) and
  autotune_ms (and trying kernels out), compiled_graphs (how many graphs that made) and recompiled_graphs (how many more
  the timed repeats made; their times are not those of the kernels then), {forward,backward}_ms_{median,p20,p80,
  repeats}, and where it was asked for forward_graph_ms_* (in a CUDA graph, without what launching costs);
* memory: peak_memory_bytes (of the whole pass, above what was allocated before it), workspace_bytes (of that, what is
  not the result), peak_reserved_bytes (CUDA: what the allocator took from the device for it), memory_method;
* work: flops and tflops (a second) of the pattern, density (attended pairs of those that the mask allows),
  keys_per_query, bytes_min (each input, result and gradient once);
* against the machine's ceilings, which are measured once a sweep: matmul_tflops, copy_gb_s (read and written),
  fraction_of_peak (of the product's rate), roofline_ms (the least time that both allow), fraction_of_roofline;
* error: {implementation,approximation,total}_rel_l2, total_cosine, total_max_abs, recall, oracle_rel_l2,
  grad_{implementation,approximation,total}_rel_l2, error_rows (how many query rows they come from);
* where: machine, cpu, cpu_threads, gpu, gpu_driver, gpu_sm_count, gpu_memory_bytes, memory_total_bytes, python, torch,
  effattn, commit, started_at (UTC), wall_s (process start included); on CUDA, before and after the timed repeats,
  gpu_{sm_clock_mhz,temperature_c,power_w}_{before,after}.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

Record = dict[str, Any]


def read(path: Path) -> dict[str, Record]:
    """The records at ``path`` by cell key, the last of each; none where there is no file. A torn end is
    left out.

    Raises:
        ValueError: naming file and line, where anything but the end is no record.
    """
    records: dict[str, Record] = {}
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            records[record["cell"]] = record
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"records: line {number} of {path} is no record: {line[:60]!r}") from None
    return records


class RecordWriter:
    """Appends records to a file that no other process may write meanwhile; a context manager.

    Raises:
        ValueError: if another process is writing to the same file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab+")
        try:
            _lock(self._file.fileno())
        except OSError:
            self._file.close()
            raise ValueError(f"records: another sweep is writing to {path}") from None
        self._cut_torn_end()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, on the disk when this returns."""
        line = json.dumps(record, allow_nan=False).encode()
        self._file.write(line + b"\n")
        self._flush()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def _cut_torn_end(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)
        self._flush()

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def _lock(descriptor: int) -> None:
    """Hold the file until this process ends, however it ends; ``OSError`` where another one holds it."""
    if os.name == "posix":
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
