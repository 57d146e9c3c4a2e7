// SPDX-License-Identifier: Apache-2.0
#include "bindings/router_dicts.h"

namespace twinpool::bindings {

namespace py = pybind11;

namespace {

py::dict fit_dict(const placement::Fit& fit) {
  py::dict out;
  out["base_seconds"] = fit.coefficients()[0];
  out["per_unit_seconds"] = fit.coefficients()[1];
  out["per_context_seconds"] = fit.coefficients()[2];
  out["residual_seconds"] = fit.residual();
  out["samples"] = fit.samples();
  return out;
}

py::object worker_name(const admission::RouterCore& core, placement::WorkerRef ref) {
  const placement::Worker* worker = core.workers().get(ref);
  if (worker == nullptr)
    return py::none();
  return py::make_tuple(worker->spec.name, worker->spec.incarnation);
}

py::dict candidate_dict(const admission::RouterCore& core, const placement::Candidate& candidate) {
  py::dict out;
  out["prefill"] = worker_name(core, candidate.prefill);
  out["decode"] = worker_name(core, candidate.decode);
  out["fetch_from"] = worker_name(core, candidate.fetch_from);
  out["fetch_blocks"] = candidate.fetch_blocks;
  out["local"] = candidate.local;
  out["prefill_cached_blocks"] = candidate.prefill_cached_blocks;
  out["decode_cached_blocks"] = candidate.decode_cached_blocks;
  out["uncached_tokens"] = candidate.uncached_tokens;
  out["prefill_wait_seconds"] = candidate.terms.prefill_wait;
  out["fetch_seconds"] = candidate.terms.fetch;
  out["compute_seconds"] = candidate.terms.compute;
  out["transfer_seconds"] = candidate.terms.transfer;
  out["decode_wait_seconds"] = candidate.terms.decode_wait;
  out["harm_seconds"] = candidate.terms.harm;
  out["total_seconds"] = candidate.terms.total();
  return out;
}

}  // namespace

py::list worker_dicts(const admission::RouterCore& core) {
  py::list out;
  for (std::uint32_t slot = 0; slot < core.workers().slots(); ++slot) {
    const placement::Worker& worker = core.workers().at(slot);
    if (worker.epoch == 0)
      continue;
    py::dict row;
    row["name"] = worker.spec.name;
    row["incarnation"] = worker.spec.incarnation;
    row["pool"] = worker.spec.pool;
    row["role"] = placement::name_of(worker.spec.role);
    row["state"] = placement::name_of(worker.spec.state);
    row["fingerprint"] = worker.spec.fingerprint;
    row["num_blocks"] = worker.spec.num_blocks;
    row["block_tokens"] = worker.spec.block_tokens;
    row["max_num_seqs"] = worker.spec.max_num_seqs;
    row["quarantined_until"] = worker.quarantined_until;
    row["on_probation"] = worker.on_probation;
    row["reported"] = worker.report.has_value();
    row["reported_at"] = worker.report ? py::object(py::float_(worker.report->at)) : py::object(py::none());
    row["running"] = worker.report ? worker.report->running : 0;
    row["waiting"] = worker.report ? worker.report->waiting : 0;
    row["reserved_prefill_tokens"] = worker.prefill_tokens.total;
    row["reserved_blocks"] = worker.prompt_blocks.total + worker.growth_blocks;
    row["reserved_sequences"] = worker.sequences.total;
    row["reservations"] = worker.holds;
    row["transfers"] = worker.transfers;
    row["queued_prefill_tokens"] = worker.queued_prefill_tokens();
    row["available_blocks"] = worker.available_blocks();
    row["busy_sequences"] = worker.busy_sequences();
    row["served"] = worker.served;
    row["indexed_blocks"] = core.index().blocks_of(worker.index_slot);
    row["prefill_model"] = fit_dict(worker.prefill);
    row["transfer_model"] = fit_dict(worker.transfer);
    row["step_model"] = fit_dict(worker.step);
    out.append(row);
  }
  return out;
}

py::dict explain_dict(const admission::RouterCore& core, std::uint64_t id) {
  const admission::Request& request = core.request(id);
  const placement::Decision& decision = request.decision;
  py::dict out;
  out["state"] = std::string(admission::name_of(request.state));
  out["attempt"] = request.attempt;
  out["obstacle"] = placement::name_of(decision.obstacle);
  out["pairs"] = decision.pairs;
  if (decision.pairs > 0) {
    out["chosen"] = candidate_dict(core, decision.best);
  } else {
    out["chosen"] = py::none();
  }
  py::list others;
  for (std::size_t i = 0; i < decision.others_count; ++i)
    others.append(candidate_dict(core, decision.others[i]));
  out["others"] = others;
  return out;
}

}  // namespace twinpool::bindings
