// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string_view>

#include "bindings/bindings.h"
#include "transfer/cover.h"
#include "transfer/ticket.h"

namespace twinpool::bindings {

namespace {

py::tuple py_cover_blocks(const py::array& blocks, std::int64_t gap) {
  require(gap >= 0, "gap must not be negative");
  Cover found = cover(int32_span(blocks, "blocks"), gap);
  return py::make_tuple(to_array(std::move(found.entries)), to_array(std::move(found.positions)));
}

py::object py_read_ticket(const py::bytes& message, std::int64_t pool_blocks, std::int64_t prompt_tokens,
                          std::int64_t block_tokens, std::int64_t lease_seconds_max) {
  // Beyond int32 a block has no number here, and a prompt of so many tokens no length.
  constexpr std::int64_t limit = std::int64_t{1} << 31U;
  require(0 <= pool_blocks && pool_blocks <= limit, "pool_blocks must lie between 0 and 2^31");
  require(1 <= prompt_tokens && 1 <= block_tokens, "prompt_tokens and block_tokens must be at least 1");
  require(prompt_tokens < limit * limit && block_tokens <= limit, "prompt_tokens or block_tokens is too large");
  require(0 <= lease_seconds_max && lease_seconds_max < limit, "lease_seconds_max must lie between 0 and 2^31");
  const auto bytes = static_cast<std::string_view>(message);
  std::optional<TicketFields> ticket = read_ticket({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
  if (!ticket) {
    return py::str("not a ticket");
  }
  const TicketBounds bounds{pool_blocks, prompt_tokens, block_tokens, lease_seconds_max};
  if (const auto problem = problem_of(*ticket, bounds)) {
    return py::str(*problem);
  }
  py::tuple digests(ticket->digests.size());
  for (std::size_t i = 0; i < ticket->digests.size(); ++i) {
    digests[i] = py::int_(ticket->digests[i]);
  }
  // Smaller than pool_blocks, so the numbers fit.
  std::vector<std::int32_t> blocks(ticket->blocks.begin(), ticket->blocks.end());
  const double lease = static_cast<double>(ticket->lease_seconds) + static_cast<double>(ticket->lease_nanos) / 1e9;
  return py::make_tuple(ticket->transfer_id, ticket->first_block, to_array(std::move(blocks)),
                        to_array(std::move(ticket->generations)), digests, ticket->length_tokens, lease);
}

}  // namespace

void bind_transfer(py::module_& module) {
  module.def("cover_blocks", &py_cover_blocks, py::arg("blocks"), py::arg("gap"));
  module.def("read_ticket", &py_read_ticket, py::arg("message"), py::arg("pool_blocks"), py::arg("prompt_tokens"),
             py::arg("block_tokens"), py::arg("lease_seconds_max"));
}

}  // namespace twinpool::bindings
