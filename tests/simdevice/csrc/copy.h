// Copies between the host and the devices, ordered on streams as CUDA's are.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

void copy_tensor(const at::Tensor& from, const at::Tensor& to, bool non_blocking);
at::Scalar read_scalar(const at::Tensor& tensor);

}  // namespace sim
