{{/* Names, labels and selectors. Selectors hold the release, the part and the pool: no label that a user gives. */}}

{{- define "twinpool.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := .Values.fullnameOverride | default (eq .Release.Name $name | ternary $name (printf "%s-%s" .Release.Name $name)) -}}
{{- /* 26: with the pool (16), the role and the suffixes of StatefulSets and pods, names stay below 63. */ -}}
{{- if or (gt (len $full) 26) (contains "." $full) -}}
{{- printf "%s-%s" ($full | replace "." "-" | trunc 17 | trimSuffix "-") ($full | sha256sum | trunc 8) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{- define "twinpool.clusterName" -}}
{{- $name := .Values.clusterName | default (printf "%s-%s" .Release.Namespace (include "twinpool.fullname" .)) -}}
{{- if gt (len $name) 63 -}}{{- printf "%s-%s" ($name | trunc 54 | trimSuffix "-") ($name | sha256sum | trunc 8) -}}{{- else -}}{{- $name -}}{{- end -}}
{{- end -}}

{{- define "twinpool.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "twinpool.fullname" .) "default") -}}
{{- end -}}

{{- define "twinpool.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ printf "%s@%s" .repository .digest }}{{- else -}}{{ printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of a worker. Takes root and a pool: one with GPUs has the variant for CUDA. */}}
{{- define "twinpool.workerImage" -}}
{{- if gt (int64 .v.gpu.count) 0 -}}
{{- $tag := .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- with .root.Values.image -}}
{{- if .cudaDigest -}}{{ printf "%s@%s" .repository .cudaDigest }}{{- else -}}{{ printf "%s:%s" .repository (.cudaTag | default (printf "%s-cuda" $tag)) }}{{- end -}}
{{- end -}}
{{- else -}}
{{- include "twinpool.image" .root -}}
{{- end -}}
{{- end -}}

{{- define "twinpool.etcdImage" -}}
{{- with .Values.etcd.image -}}
{{- if .repository -}}{{ printf "%s:%s" .repository (.tag | default "latest") }}{{- else -}}{{ include "twinpool.image" $ }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* All pods of the release. */}}
{{- define "twinpool.releaseSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Takes root, component and, for workers, pool. */}}
{{- define "twinpool.selector" -}}
{{ include "twinpool.releaseSelector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
twinpool.dev/pool: {{ . }}
{{- end }}
{{- end -}}

{{/* Takes what selector takes and, for workers, key: the model's. */}}
{{- define "twinpool.labels" -}}
{{- $own := include "twinpool.selector" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "twinpool" -}}
{{- with .key -}}{{- $_ := set $own "twinpool.dev/model" . -}}{{- end -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) -}}
{{- merge $own (deepCopy .root.Values.commonLabels) | toYaml -}}
{{- end -}}

{{/* Takes what labels takes, and labels. What the selector matches can't be taken away. */}}
{{- define "twinpool.podLabels" -}}
{{- $own := dict "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- with .key -}}{{- $_ := set $own "twinpool.dev/model" . -}}{{- end -}}
{{- merge (include "twinpool.selector" . | fromYaml) $own (deepCopy .labels) (deepCopy .root.Values.commonLabels) | toYaml -}}
{{- end -}}

{{- define "twinpool.workerName" -}}
{{- printf "%s-%s-%s" (include "twinpool.fullname" .root) .pool .component -}}
{{- end -}}

{{- define "twinpool.priorityClass" -}}
{{- printf "%s-%s-%s" .root.Release.Namespace (include "twinpool.fullname" .root) .kind -}}
{{- end -}}
