// SPDX-License-Identifier: Apache-2.0
// Parts of the router core's binding. The dictionaries are for people and tests: not on the path of a request.
#pragma once

#include <pybind11/pybind11.h>

#include "admission/router_core.h"

namespace twinpool::bindings {

void bind_router_types(pybind11::module_& module);
/// STATES, EVENTS and TRANSITIONS of the class, and the module's replay_log.
void bind_router_tables(pybind11::module_& module, pybind11::object core);

pybind11::list worker_dicts(const admission::RouterCore& core);
pybind11::dict explain_dict(const admission::RouterCore& core, std::uint64_t request);

}  // namespace twinpool::bindings
