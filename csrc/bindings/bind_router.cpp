// SPDX-License-Identifier: Apache-2.0
// Python names of the router core: admission, placement, prefix index.
#include "bindings/bindings.h"

namespace twinpool::bindings {

void bind_router(py::module_& module) { (void)module; }

}  // namespace twinpool::bindings
