// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "blocks/block.h"
#include "hash/hash128.h"

namespace twinpool {

/// Whose prefix a pin keeps, and until when. The strings are opaque here.
struct PrefixPinOwner {
  std::string pin;     ///< the same for the same prefix of the same owner
  std::string tenant;  ///< whose blocks are counted
  std::string session;
  double expires_at = 0;
};

/// Most that prefix pins may hold. Blocks are counted once, whoever else pins them too.
struct PrefixPinLimits {
  std::size_t pins = 0;
  std::size_t blocks = 0;         ///< of the pool
  std::size_t tenant_blocks = 0;  ///< of the owner's tenant
};

enum class PrefixPinRefusal : std::uint8_t {
  none,
  missing,  ///< not all of the prefix is cached
  pins,
  blocks,
  tenant_blocks,
};
const char* name_of(PrefixPinRefusal refusal) noexcept;

struct PrefixPinResult {
  PrefixPinRefusal refusal = PrefixPinRefusal::none;
  std::size_t blocks = 0;  ///< what is pinned; of a missing prefix, what is cached
  double expires_at = 0;   ///< of the pin; 0 where it was refused
};

/// Which pins end: those of the tenant that fit every field that is not empty.
struct PrefixPinFilter {
  std::string tenant;
  std::string pin;
  std::string session;
  std::optional<Hash128> last;  ///< of the prefix
};

/// Which prefix is kept in the cache for whom and until when. Only the books: the block manager keeps the blocks
/// themselves. A prefix is pinned from its first block, so its blocks have the order of their chain.
class PrefixPins {
 public:
  struct Pin {
    PrefixPinOwner owner;
    std::vector<BlockId> blocks;
    Hash128 last;
  };

  [[nodiscard]] std::size_t size() const noexcept { return pins_.size(); }
  [[nodiscard]] const Pin* find(const std::string& pin) const;
  /// Blocks that the tenant's pins hold.
  [[nodiscard]] std::size_t tenant_blocks(const std::string& tenant) const;
  [[nodiscard]] bool tenant_has(const std::string& tenant, BlockId block) const;
  [[nodiscard]] std::optional<double> next_expiry() const;

  /// A pin that is not there yet.
  void add(Pin pin);
  /// Never makes it shorter; returns when it ends now.
  double prolong(const std::string& pin, double expires_at);

  /// Takes out the pins whose time is over (expires_at <= now), earliest first.
  std::vector<Pin> expire(double now);
  /// Takes out the pins that the filter names.
  std::vector<Pin> take(const PrefixPinFilter& filter);
  /// Takes out the pin that would end first.
  std::optional<Pin> take_next();

  template <typename Visit>
  void for_each(Visit&& visit) const {
    for (const auto& [id, pin] : pins_) {
      visit(pin);
    }
  }
  /// True if the order of expiry and the tenants' counts agree with the pins.
  [[nodiscard]] bool consistent() const;

 private:
  using Table = std::unordered_map<std::string, Pin>;
  using Counts = std::unordered_map<BlockId, std::uint32_t>;

  Pin remove(Table::iterator at);
  [[nodiscard]] std::unordered_map<std::string, Counts> counted() const;

  Table pins_;
  std::set<std::pair<double, std::string>> by_expiry_;
  std::unordered_map<std::string, Counts> tenants_;
};

}  // namespace twinpool
