// SPDX-License-Identifier: Apache-2.0
// Python names of the router core: admission, placement, prefix index.

#include <pybind11/pybind11.h>

void bind_router(pybind11::module_& m) { (void)m; }
