// SPDX-License-Identifier: Apache-2.0
// twinpool._core, typed in twinpool/_core.pyi. Python may write the fields of the two config types and nothing else:
// all other types are read-only properties and methods.
#include "bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  namespace bindings = twinpool::bindings;
  module.doc() = "The deterministic core: no I/O, no clock.";
  pybind11::register_exception<twinpool::CoreError>(module, "CoreError");
  bindings::bind_hash(module);
  bindings::bind_blocks(module);
  bindings::bind_scheduler(module);
  bindings::bind_router(module);
  bindings::bind_transfer(module);
}
