// SPDX-License-Identifier: Apache-2.0
// How long a request will take, and how far off that was. A deadline is of the whole answer: a pool that looked at
// first tokens alone would, when it is overloaded, begin answers up to the moment when none of them can end in time.
#include <algorithm>

#include "admission/router_core.h"

namespace twinpool::admission {

double RouterCore::token_seconds(const Request& request, const placement::Candidate& pair) const {
  const placement::Worker* worker = workers_.get(pair.decode);
  const double tokens = pools_[request.pool]->output_ratio.usual(request.max_new_tokens);
  if (worker == nullptr || !worker->step.measured() || tokens <= 1) {
    return 0.0;
  }
  const auto choices = static_cast<double>(request.choices);
  const double context = choices * (static_cast<double>(request.prompt_tokens) + tokens / 2.0);
  return worker->step.predict(worker->busy_sequences() + choices, worker->context_tokens() + context);
}

// Seconds from a placement on that pair to the end of an answer of the usual length; to the first token alone where the
// rest was not measured yet, and for an answer that goes on: its client has use for every further token.
double RouterCore::predicted_seconds(double now, const Request& request, const placement::Candidate& pair) const {
  const double first = pair.terms.first_token();
  const double token = request.delivered ? 0.0 : token_seconds(request, pair);
  if (token <= 0) {
    return first;
  }
  const Pool& of = *pools_[request.pool];
  const double further = of.output_ratio.usual(request.max_new_tokens) - 1.0;
  return of.slip.factor(now) * (first + pair.terms.transfer + further * token);
}

void RouterCore::note_slip(double now, const Request& request) {
  const bool finished = std::holds_alternative<Finished>(request.state);
  if (request.predicted_first <= 0 || request.attempt != 1 ||
      !(finished || std::holds_alternative<Expired>(request.state))) {
    return;
  }
  Pool& of = pool_of(request);
  // What its deadline has ended would have taken longer still.
  const double tokens = finished ? static_cast<double>(request.output_tokens) / static_cast<double>(request.choices)
                                 : of.output_ratio.usual(request.max_new_tokens);
  const double further = std::max(0.0, tokens - 1.0) * request.predicted_token;
  of.slip.add(now, now - request.placed_at, request.predicted_first + further);
}

}  // namespace twinpool::admission
