// What the cores can do at best, for the benchmarks to set their figures against: measured beside
// the code under test, because the machine's share of bandwidth and clock changes with its
// neighbours.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/core/buffer.h"
#include "runtime/core/thread_pool.h"

namespace lockstep {

double NowSeconds();
double Median(std::vector<double> values);

// Reads all of `memory` once, in order, each thread its part; returns bytes a second. More than the
// last-level cache, or it is the cache that is measured.
double ReadBytesPerSecond(const Buffer& memory, ThreadPool& threads);

// Multiply-adds on registers alone for some milliseconds a thread, by the widest instruction that
// Linear could use for the dtype on this CPU (bfloat16: vdpbf16ps where there is one, else as
// float32); returns floating-point operations a second, a multiply-add counting 2.
double PeakFlopsPerSecond(DType dtype, ThreadPool& threads);

// Fills memory with values of one magnitude (denormals, for example, would cost extra).
void FillUniform(DType dtype, const Buffer& buffer);

}  // namespace lockstep
