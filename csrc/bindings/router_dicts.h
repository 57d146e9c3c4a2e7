// SPDX-License-Identifier: Apache-2.0
// Views of the router core as Python dictionaries, for people and tests: not on the path of a request.
#pragma once

#include <pybind11/pybind11.h>

#include "admission/router_core.h"

namespace twinpool::bindings {

pybind11::list worker_dicts(const admission::RouterCore& core);
pybind11::dict explain_dict(const admission::RouterCore& core, std::uint64_t request);

}  // namespace twinpool::bindings
