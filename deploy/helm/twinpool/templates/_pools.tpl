{{/* Pools: each model has one of its own name, and those that its `pools` names. */}}

{{/* The pools of the models, as JSON: {"pools": [{pool, component, key, model, own, v}]}, one for each role. own: what the pool has
beside the model's; v: the block of values of its workers. */}}
{{- define "twinpool.pools" -}}
{{- $pools := list -}}
{{- $seen := dict -}}
{{- range $key, $model := .Values.models -}}
{{- if $model -}}
{{- $blocks := dict $key (pick $model "takes") -}}
{{- range $name, $block := $model.pools | default dict -}}
{{- if kindIs "map" $block -}}{{- $_ := set $blocks (printf "%s-%s" $key $name) $block -}}{{- end -}}
{{- end -}}
{{- range $pool, $own := $blocks -}}
{{- include "twinpool.checkPool" (dict "pool" $pool "own" $own "key" $key "seen" $seen) -}}
{{- $_ := set $seen $pool $key -}}
{{- range $component := list "prefill" "decode" -}}
{{- $v := get $.Values $component -}}
{{- range list $model $own -}}
{{- $v = include "twinpool.merge" (list $v (get . $component | default dict)) | fromJson -}}
{{- end -}}
{{- $pools = append $pools (dict "pool" $pool "component" $component "key" $key "model" $model "own" $own "v" $v) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "pools" $pools | toJson -}}
{{- end -}}

{{/* Refuses a pool that cannot be. Takes pool, own, key and seen: the model's key by pool, of those before. */}}
{{- define "twinpool.checkPool" -}}
{{- if gt (len .pool) 16 -}}{{- fail (printf "models.%s: the pool %s has more than 16 characters; shorten the name of the model or of the pool" .key .pool) -}}{{- end -}}
{{- with get .seen .pool -}}{{- fail (printf "models.%s and models.%s have a pool %s each; give one another name" . $.key $.pool) -}}{{- end -}}
{{- $takes := .own.takes | default dict -}}
{{- range $kind := list "promptTokens" "priority" -}}
{{- $least := get $takes (printf "%sLeast" $kind) -}}
{{- $most := get $takes (printf "%sMost" $kind) -}}
{{- if not (or (kindIs "string" $least) (kindIs "string" $most)) -}}
{{- if gt (int64 $least) (int64 $most) -}}{{- fail (printf "pool %s: takes.%sLeast %d exceeds takes.%sMost %d" $.pool $kind (int64 $least) $kind (int64 $most)) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Their names, as a list in JSON. */}}
{{- define "twinpool.poolNames" -}}
{{- $names := list -}}
{{- range (include "twinpool.pools" . | fromJson).pools -}}{{- $names = append $names .pool -}}{{- end -}}
{{- uniq $names | toJson -}}
{{- end -}}

{{/* What routers are told of the pools, with counts also the controller: `pools.further` as YAML. Takes root and counts. */}}
{{- define "twinpool.furtherPools" -}}
{{- $root := .root -}}
{{- $counts := .counts -}}
{{- $further := dict -}}
{{- range (include "twinpool.pools" $root | fromJson).pools -}}
{{- $keys := get $further .pool | default dict -}}
{{- range $name, $value := .own.takes | default dict -}}
{{- $_ := set $keys (snakecase $name) (kindIs "bool" $value | ternary $value ($value | int64)) -}}
{{- end -}}
{{- if $counts -}}
{{- $keys = merge $keys (include "twinpool.roleKeys" (merge (dict "root" $root) .) | fromYaml) -}}
{{- else -}}
{{- $_ := set $keys "model" (dict "path" (include "twinpool.modelPath" .) "name" (.model.name | default .key)) -}}
{{- end -}}
{{- $_ := set $further .pool $keys -}}
{{- end -}}
{{- toYaml $further -}}
{{- end -}}

{{/* How many workers the controller runs of a role, and what they need. Takes root and a pool. */}}
{{- define "twinpool.roleKeys" -}}
{{- if not (include "twinpool.withRay" .root) }}
{{- /* StatefulSets: it starts no workers. */}}
{{ .component }}_workers: 0
{{- else }}
{{- $needs := list (printf "%s=1" (include "twinpool.rayResource" .)) }}
{{- if gt (int64 .v.gpu.count) 0 }}{{ $needs = append $needs (printf "GPU=%d" (int64 .v.gpu.count)) }}{{ end }}
{{ .component }}_resources: {{ toJson $needs }}
{{- if .v.autoscaling.enabled }}
{{ .component }}_workers: {{ int64 (max (int64 .v.autoscaling.minReplicas) (min (int64 .v.replicas) (int64 .v.autoscaling.maxReplicas))) }}
{{ .component }}_least: {{ int64 .v.autoscaling.minReplicas }}
{{ .component }}_most: {{ int64 .v.autoscaling.maxReplicas }}
{{- else }}
{{- /* Changes of roles go on in the pods that there are. */}}
{{- $pool := .pool }}
{{- $total := 0 }}
{{- range (include "twinpool.pools" .root | fromJson).pools }}{{ if eq .pool $pool }}{{ $total = add $total (int64 .v.replicas) }}{{ end }}{{ end }}
{{ .component }}_workers: {{ int64 .v.replicas }}
{{ .component }}_most: {{ int64 $total }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The longest drain of all workers; nothing without workers. */}}
{{- define "twinpool.drainSeconds" -}}
{{- $root := . -}}
{{- $longest := 0.0 -}}
{{- range (include "twinpool.pools" . | fromJson).pools -}}
{{- $worker := (include "twinpool.config" (merge (dict "root" $root) .) | fromYaml).worker -}}
{{- $longest = maxf $longest ($worker.drain_timeout_seconds | default 30) -}}
{{- end -}}
{{- if gt $longest 0.0 -}}{{ $longest }}{{- end -}}
{{- end -}}
