// SPDX-License-Identifier: Apache-2.0
// A ticket of the hand-off (message Ticket in proto/twinpool/v1/handoff.proto): its lists, and whether it can be
// believed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace twinpool {

struct TicketFields {
  std::uint64_t transfer_id = 0;
  std::uint32_t first_block = 0;
  std::vector<std::uint32_t> blocks;
  std::vector<std::uint64_t> generations;
  std::vector<std::uint64_t> digests;
  std::uint32_t length_tokens = 0;
  std::int64_t lease_seconds = 0;
  std::int32_t lease_nanos = 0;
};

/// What a ticket has to agree with.
struct TicketBounds {
  std::int64_t pool_blocks;  // of the owner
  std::int64_t prompt_tokens;
  std::int64_t block_tokens;
  std::int64_t lease_seconds_max;
};

/// Reads a serialised ticket; its owner and its attempt are skipped. nullopt: these bytes are no message.
std::optional<TicketFields> read_ticket(std::span<const std::uint8_t> message);

/// Why a ticket contradicts itself, the pool or the prompt; nullopt if it does not. What costs no time with the number
/// of blocks comes first.
std::optional<std::string> problem_of(const TicketFields& ticket, const TicketBounds& bounds);

}  // namespace twinpool
