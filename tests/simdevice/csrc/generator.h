// Random numbers: a counter per device, as CUDA's Philox generator has a seed and an offset.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);

// A CPU generator for one kernel. It is drawn when the kernel is launched, so that the numbers depend on the order
// of the launches and not on the order in which streams run them.
at::Generator draw(const at::Generator& generator, c10::DeviceIndex index);

}  // namespace sim
