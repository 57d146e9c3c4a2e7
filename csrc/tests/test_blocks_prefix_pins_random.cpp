// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <random>

#include "tests/prefix_pin_fixture.h"

namespace twinpool::test {
namespace {

/// Random calls, each followed by a check of every invariant and of what must hold of pins whatever came before.
TEST(PrefixPins, HoldTheirPromiseUnderRandomUse) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t limit) { return static_cast<std::size_t>(random()) % limit; };
    BlockPool pool(12);
    struct Known {
      std::string tenant;
      Hashes hashes;
      double expires_at;
    };
    std::map<std::string, Known> pins;
    std::vector<Ids> held;
    double now = 0;
    for (int step = 0; step < 400; ++step) {
      const std::size_t shared = below(3);
      const Hashes hashes = branch(shared, static_cast<std::int32_t>(2 + below(3)), 1 + below(3));
      switch (below(7)) {
      case 0:
      case 1: {
        Ids ids;
        const auto prefix = pool.manager.acquire(hashes, hashes.size(), 0, ids);
        if (prefix) {
          const Ids fresh(ids.begin() + static_cast<std::ptrdiff_t>(*prefix), ids.end());
          pool.commit(fresh, Hashes(hashes.begin() + static_cast<std::ptrdiff_t>(*prefix), hashes.end()),
                      *prefix == 0 ? Hash128{} : hashes[*prefix - 1]);
          held.push_back(ids);
        }
        break;
      }
      case 2:
      case 3:
        if (!held.empty()) {
          std::swap(held[below(held.size())], held.back());
          pool.manager.release(held.back());
          if (below(2) == 0) {
            pool.manager.demote(held.back(), generations_of(pool, held.back()));
          }
          held.pop_back();
        }
        break;
      case 4: {
        const std::string tenant = below(2) == 0 ? "t" : "u";
        const std::string id = tenant + std::to_string(hashes.back().high()) + std::to_string(hashes.size());
        const PrefixPinLimits limits{.pins = 4, .blocks = 6, .tenant_blocks = 4};
        const double until = now + static_cast<double>(1 + below(20));
        const auto result = pool.manager.pin_prefix(owner(id, until, tenant), hashes, limits);
        if (result.refusal == PrefixPinRefusal::none) {
          Known& known = pins.try_emplace(id, Known{tenant, hashes, until}).first->second;
          known.expires_at = std::max(known.expires_at, until);
          EXPECT_EQ(result.expires_at, known.expires_at);
        }
        break;
      }
      case 5: {
        now += static_cast<double>(below(3));
        const std::size_t over = std::erase_if(pins, [&](const auto& pin) { return pin.second.expires_at <= now; });
        EXPECT_EQ(pool.manager.expire_prefix_pins(now), over);
        break;
      }
      default: {
        const std::size_t over = pins.empty() ? 0 : 1;
        const std::string id = pins.empty() ? "none" : pins.begin()->first;
        const std::string tenant = pins.empty() ? "t" : pins.begin()->second.tenant;
        EXPECT_EQ(pool.manager.unpin_prefixes({.tenant = tenant, .pin = id, .session = "", .last = {}}).size(), over);
        pins.erase(id);
      }
      }
      pool.manager.check();
      EXPECT_EQ(pool.manager.prefix_pins(), pins.size());
      EXPECT_LE(pool.manager.prefix_pinned_blocks(), 6U);
      for (const auto& [id, pin] : pins) {
        ASSERT_EQ(pool.manager.lookup(pin.hashes), pin.hashes.size()) << "seed " << seed << ", step " << step;
      }
      ASSERT_EQ(pool.manager.free_blocks() + pool.manager.cached_blocks() + pool.manager.held_blocks(), 12U);
    }
    for (const Ids& ids : held) {
      pool.manager.release(ids);
    }
    EXPECT_EQ(pool.manager.free_blocks() + pool.manager.cached_blocks(), 12U);
    EXPECT_EQ(pool.manager.available_blocks(), 12U - pool.manager.prefix_pinned_blocks());
  }
}

}  // namespace
}  // namespace twinpool::test
