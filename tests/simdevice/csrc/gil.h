// Lets the GIL go while this thread waits for a stream, if it has it; a kernel in Python may need it meanwhile.
#pragma once

#include <Python.h>

namespace sim {

class ReleaseGil {
 public:
  ReleaseGil() {
    if (Py_IsInitialized() && PyGILState_Check()) {
      state_ = PyEval_SaveThread();
    }
  }
  ~ReleaseGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace sim
