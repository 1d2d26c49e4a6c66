"""Bytes that torch's CPU allocator has handed out: exact, over all threads, from a counter put in front of it.

Resident memory would mostly show torch's import and the compiler's heap. torch.profiler's memory events are no way
either: they miss what threads without a profiler free, such as those of gloo, and so drift upwards; with 2 ranks of the
27 M-parameter GPT by 12 MiB a step under FSDP2 and by more than 100 MiB under dsgraph.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import torch

_SOURCE = r"""
#include <c10/core/CPUAllocator.h>
#include <mutex>
#include <unordered_map>

namespace {
std::mutex mutex;
std::unordered_map<void*, size_t> sizes;  // of what is alive
long long live = 0, peak = 0, allocated = 0;
c10::Allocator* inner = nullptr;

void forget(void* data) {
  if (data == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = sizes.find(data);
    if (found != sizes.end()) { live -= found->second; sizes.erase(found); }
  }
  inner->raw_deleter()(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr got = inner->allocate(bytes);
    void* data = got.get();
    if (data == nullptr) return got;
    std::lock_guard<std::mutex> lock(mutex);
    sizes[data] = bytes;
    live += bytes;
    allocated += bytes;
    if (live > peak) peak = live;
    return {data, got.release_context(), &forget, got.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &forget; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
}  // namespace

extern "C" {
void install() {
  static Counting counting;
  inner = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, /*priority=*/100);
}
long long live_bytes() { std::lock_guard<std::mutex> lock(mutex); return live; }
long long peak_bytes() { std::lock_guard<std::mutex> lock(mutex); return peak; }
long long allocated_bytes() { std::lock_guard<std::mutex> lock(mutex); return allocated; }
void reset_peak() { std::lock_guard<std::mutex> lock(mutex); peak = live; }
}
"""


def process_bytes(which: Literal["VmRSS", "VmHWM"]) -> int:
    """Return the resident memory of this process, or its peak since its program started.

    `getrusage` is not used, because its peak includes the program before `exec`.
    """
    found = re.search(rf"^{which}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def build_counter(folder: Path) -> Path | None:
    """Compile the counter, which takes a few seconds.

    Args:
        folder: Where to put it. It must outlive the processes that count.

    Returns:
        The library for `AllocationCounter`; None when there is no C++ compiler ($CXX, by default `g++`).

    Raises:
        RuntimeError: The compiler refused the source; the message holds its output.
    """
    from torch.utils import cpp_extension  # imports setuptools, which no worker needs

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    source, library = folder / "counter.cpp", folder / "counter.so"
    source.write_text(_SOURCE)
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    link = [f"-L{path}" for path in cpp_extension.library_paths()]
    command = [compiler, *flags, str(source), *include, *link, "-lc10", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return library


class AllocationCounter:
    """Counts from its making to the end of the process; make one a process, before the first tensor."""

    def __init__(self, library: Path) -> None:
        """Put the counter in front of the allocator. `library` is from `build_counter`."""
        self._counter = ctypes.CDLL(str(library))
        for function in (self._counter.live_bytes, self._counter.peak_bytes, self._counter.allocated_bytes):
            function.restype = ctypes.c_longlong
        self._counter.install()

    @property
    def live(self) -> int:
        """Bytes alive now that were allocated since the counter was made."""
        return int(self._counter.live_bytes())

    @property
    def peak(self) -> int:
        """The most bytes alive at once since `reset_peak`, or since the counter was made."""
        return int(self._counter.peak_bytes())

    @property
    def allocated(self) -> int:
        """Bytes allocated since the counter was made, alive or freed."""
        return int(self._counter.allocated_bytes())

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self._counter.reset_peak()
