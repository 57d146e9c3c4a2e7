// SPDX-License-Identifier: Apache-2.0
#include "transfer/ticket.h"

#include <algorithm>
#include <utility>

namespace twinpool {

namespace {

/// Reads protobuf's wire format. A read past the end, or of a malformed number, makes it bad for good.
class WireReader {
 public:
  explicit WireReader(std::span<const std::uint8_t> bytes)
      : rest_(bytes) {}

  [[nodiscard]] bool done() const { return bad_ || rest_.empty(); }
  [[nodiscard]] bool bad() const { return bad_; }

  std::uint64_t varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const std::uint8_t byte = rest_.front();
      rest_ = rest_.subspan(1);
      value |= std::uint64_t{byte & 0x7fU} << shift;
      if (byte < 0x80) {
        return value;
      }
    }
    bad_ = true;
    return 0;
  }

  std::uint64_t fixed64() {
    const auto bytes = take(sizeof(std::uint64_t));
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      value |= std::uint64_t{bytes[i]} << (8 * i);
    }
    return value;
  }

  std::span<const std::uint8_t> bytes() { return take(varint()); }

  /// A field that is not wanted.
  void skip(unsigned wire) {
    switch (wire) {
    case 0:
      varint();
      break;
    case 1:
      take(8);
      break;
    case 2:
      bytes();
      break;
    case 5:
      take(4);
      break;
    default:
      bad_ = true;
    }
  }

 private:
  std::span<const std::uint8_t> take(std::uint64_t size) {
    if (size > rest_.size()) {
      bad_ = true;
      return {};
    }
    const auto taken = rest_.first(static_cast<std::size_t>(size));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

  std::span<const std::uint8_t> rest_;
  bool bad_ = false;
};

constexpr unsigned varint_wire = 0;
constexpr unsigned fixed64_wire = 1;
constexpr unsigned bytes_wire = 2;

constexpr unsigned key(unsigned field, unsigned wire) {
  return field << 3U | wire;
}

/// A packed list. Every number has at least ``least_bytes``, so a short message cannot ask for much memory.
template <typename T, typename Read>
bool read_list(std::span<const std::uint8_t> packed, std::size_t least_bytes, std::vector<T>& values, Read read) {
  WireReader reader(packed);
  values.reserve(values.size() + packed.size() / least_bytes);
  while (!reader.done()) {
    values.push_back(static_cast<T>(read(reader)));
  }
  return !reader.bad();
}

bool read_lease(std::span<const std::uint8_t> message, TicketFields& ticket) {
  WireReader reader(message);
  while (!reader.done()) {
    const auto tag = reader.varint();
    if (tag == key(1, varint_wire)) {
      ticket.lease_seconds = static_cast<std::int64_t>(reader.varint());
    } else if (tag == key(2, varint_wire)) {
      ticket.lease_nanos = static_cast<std::int32_t>(reader.varint());
    } else {
      reader.skip(tag & 7U);
    }
  }
  return !reader.bad();
}

bool read_field(WireReader& reader, std::uint64_t tag, TicketFields& ticket) {
  const auto varint = [](WireReader& from) { return from.varint(); };
  const auto fixed64 = [](WireReader& from) { return from.fixed64(); };
  switch (tag) {
  case key(1, fixed64_wire):
    ticket.transfer_id = reader.fixed64();
    return true;
  case key(4, varint_wire):
    ticket.first_block = static_cast<std::uint32_t>(reader.varint());
    return true;
  case key(5, bytes_wire):
    return read_list(reader.bytes(), 1, ticket.blocks, varint);
  case key(6, bytes_wire):
    return read_list(reader.bytes(), 1, ticket.generations, varint);
  case key(7, bytes_wire):
    return read_list(reader.bytes(), 8, ticket.digests, fixed64);
  case key(8, varint_wire):
    ticket.length_tokens = static_cast<std::uint32_t>(reader.varint());
    return true;
  case key(9, bytes_wire):
    return read_lease(reader.bytes(), ticket);
  default:
    reader.skip(tag & 7U);
    return true;
  }
}

bool lease_is_bad(const TicketFields& ticket, std::int64_t seconds_max) {
  constexpr std::int64_t nanos_of_second = 1'000'000'000;
  constexpr std::int64_t margin = 3;  // seconds that int32 nanoseconds can add or take away
  if (ticket.lease_seconds < -margin || ticket.lease_seconds > seconds_max + margin) {
    return true;
  }
  const std::int64_t nanos = ticket.lease_seconds * nanos_of_second + ticket.lease_nanos;
  return nanos <= 0 || nanos > seconds_max * nanos_of_second;
}

bool names_one_twice(const std::vector<std::uint32_t>& blocks) {
  std::vector<std::uint32_t> ordered(blocks);
  std::ranges::sort(ordered);
  return std::ranges::adjacent_find(ordered) != ordered.end();
}

}  // namespace

std::optional<TicketFields> read_ticket(std::span<const std::uint8_t> message) {
  TicketFields ticket;
  WireReader reader(message);
  while (!reader.done()) {
    const auto tag = reader.varint();
    if (reader.bad() || !read_field(reader, tag, ticket)) {
      return std::nullopt;
    }
  }
  return reader.bad() ? std::nullopt : std::optional(std::move(ticket));
}

std::optional<std::string> problem_of(const TicketFields& ticket, const TicketBounds& bounds) {
  const auto text = [](auto number) { return std::to_string(number); };
  const std::size_t count = ticket.blocks.size();
  const std::int64_t end = std::int64_t{ticket.first_block} + static_cast<std::int64_t>(count);
  const std::int64_t prompt_blocks = (bounds.prompt_tokens - 1) / bounds.block_tokens + 1;
  if (ticket.transfer_id == 0) {
    return "transfer id 0";
  }
  if (end > prompt_blocks) {
    return "blocks up to " + text(end) + " for a prompt of " + text(prompt_blocks);
  }
  if (ticket.generations.size() != count) {
    return text(ticket.generations.size()) + " generations for " + text(count) + " blocks";
  }
  if (!ticket.digests.empty() && ticket.digests.size() != count) {
    return text(ticket.digests.size()) + " digests for " + text(count) + " blocks";
  }
  const std::int64_t greatest = count == 0 ? -1 : std::int64_t{std::ranges::max(ticket.blocks)};
  if (greatest >= bounds.pool_blocks) {
    return "block " + text(greatest) + " is outside the owner's pool of " + text(bounds.pool_blocks);
  }
  if (names_one_twice(ticket.blocks)) {
    return "a block is named twice";
  }
  const std::int64_t tokens = std::min(end * bounds.block_tokens, bounds.prompt_tokens);
  if (ticket.length_tokens != tokens) {
    return text(ticket.length_tokens) + " tokens up to block " + text(end) + ", the prompt has " + text(tokens) +
           " there";
  }
  if (lease_is_bad(ticket, bounds.lease_seconds_max)) {
    return "the lease is not positive, or longer than " + text(bounds.lease_seconds_max) + " s";
  }
  return std::nullopt;
}

}  // namespace twinpool
