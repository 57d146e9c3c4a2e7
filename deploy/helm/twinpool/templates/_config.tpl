{{/* What the processes are told: the product's own configuration file. */}}

{{/* [base, over] as JSON: maps are merged, everything else is taken from over, empty or not. */}}
{{- define "twinpool.merge" -}}
{{- $base := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- $before := get $base $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $before) -}}
{{- $_ := set $base $key (include "twinpool.merge" (list $before $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $base $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $base -}}
{{- end -}}

{{- define "twinpool.modelPath" -}}
{{- .model.path | default (printf "/models/%s" .key) -}}
{{- end -}}

{{- define "twinpool.roleDomain" -}}
{{- .Values.tls.roleDomain | default (printf "%s.%s.twinpool" (include "twinpool.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{/* Takes root and component. The role that the certificate names. */}}
{{- define "twinpool.certificateRole" -}}
{{- has .component (list "prefill" "decode") | ternary "worker" .component -}}
{{- end -}}

{{- define "twinpool.tlsSecret" -}}
{{- get .root.Values.tls.secrets .role | default (printf "%s-%s-tls" (include "twinpool.fullname" .root) .role) -}}
{{- end -}}

{{- define "twinpool.etcdSecret" -}}
{{- .Values.etcd.auth.existingSecret | default (printf "%s-etcd-auth" (include "twinpool.fullname" .)) -}}
{{- end -}}

{{/* Secret of the password for etcd; empty: there is none. */}}
{{- define "twinpool.storeSecret" -}}
{{- if .Values.etcd.enabled -}}
{{- if .Values.etcd.auth.enabled -}}{{ include "twinpool.etcdSecret" . }}{{- end -}}
{{- else if .Values.externalEtcd.user -}}
{{- required "externalEtcd.passwordSecret is needed for externalEtcd.user" .Values.externalEtcd.passwordSecret -}}
{{- end -}}
{{- end -}}

{{- define "twinpool.clusterConfig" -}}
name: {{ include "twinpool.clusterName" . }}
{{- if .Values.etcd.enabled }}
etcd_endpoints: [{{ printf "%s-etcd.%s.svc:%d" (include "twinpool.fullname" .) .Release.Namespace (int64 .Values.ports.etcdClient) | quote }}]
{{- if .Values.etcd.auth.enabled }}
etcd_user: {{ .Values.etcd.auth.user | quote }}
{{- end }}
{{- if .Values.tls.enabled }}
etcd_ca_file: /etc/twinpool/tls/ca.crt
etcd_cert_file: /etc/twinpool/tls/tls.crt
etcd_key_file: /etc/twinpool/tls/tls.key
{{- end }}
{{- else }}
{{- if not .Values.externalEtcd.endpoints }}{{ fail "externalEtcd.endpoints is empty and etcd.enabled is false" }}{{ end }}
etcd_endpoints: {{ toJson .Values.externalEtcd.endpoints }}
etcd_user: {{ .Values.externalEtcd.user | quote }}
{{- if .Values.externalEtcd.tlsSecret }}
etcd_ca_file: /etc/twinpool/etcd-tls/ca.crt
{{- if .Values.externalEtcd.clientCertificate }}
etcd_cert_file: /etc/twinpool/etcd-tls/tls.crt
etcd_key_file: /etc/twinpool/etcd-tls/tls.key
{{- end }}
{{- end }}
{{- end }}
{{- if include "twinpool.storeSecret" . }}
etcd_password_file: /etc/twinpool/etcd-auth/password
{{- end }}
{{- end -}}

{{/* What the chart sets itself, by section. */}}
{{- define "twinpool.ownConfig" -}}
{{- $v := .root.Values -}}
{{- if ne .component "operator" }}
cluster:
  {{- include "twinpool.clusterConfig" .root | nindent 2 }}
{{- end }}
{{- if $v.tls.enabled }}
tls:
  cert_file: /etc/twinpool/tls/tls.crt
  key_file: /etc/twinpool/tls/tls.key
  ca_file: /etc/twinpool/tls/ca.crt
  role_domain: {{ include "twinpool.roleDomain" .root }}
{{- end }}
{{- if eq .component "router" }}
{{- with include "twinpool.furtherPools" (dict "root" .root) | fromYaml }}
pools:
  further:
    {{- toYaml . | nindent 4 }}
{{- end }}
metrics: {enabled: true, port: {{ int64 $v.ports.metrics }}}
router:
  port: {{ int64 $v.ports.routerGrpc }}
  {{- with include "twinpool.poolNames" .root | fromJsonArray }}
  pools: {{ toJson . }}
  {{- end }}
  http_port: {{ $v.router.http.enabled | ternary (int64 $v.ports.routerHttp) -1 }}
  {{- if or $v.tenants.existingSecret $v.tenants.file }}
  tenants_file: /etc/twinpool/tenants/tenants.yaml
  {{- end }}
  {{- if $v.router.resumeKeySecret }}
  resume_key_file: /etc/twinpool/resume/resume-key
  {{- end }}
{{- else if eq .component "control" }}
metrics: {enabled: true, port: {{ int64 $v.ports.metrics }}}
control: {port: {{ int64 $v.ports.control }}}
{{- with include "twinpool.drainSeconds" .root }}
# The longest of all workers'.
worker: {drain_timeout_seconds: {{ . }}}
{{- end }}
pools:
  # Its pools are the further ones.
  prefill_workers: 0
  decode_workers: 0
  {{- if include "twinpool.withRay" .root }}
  ray_address: {{ include "twinpool.rayAddress" .root }}
  worker_options: node
  # The next control process finds them; they end with the RayCluster.
  stop_workers: false
  {{- end }}
  {{- with include "twinpool.furtherPools" (dict "root" .root "counts" true) | fromYaml }}
  further:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- else if ne .component "operator" }}
metrics: {enabled: true, port: {{ int64 $v.ports.metrics }}}
worker:
  port: {{ int64 $v.ports.workerGrpc }}
  pool: {{ .pool }}
kv_events: {port: {{ int64 $v.ports.workerEvents }}}
model:
  path: {{ include "twinpool.modelPath" . | quote }}
  name: {{ .model.name | default .key | quote }}
{{- end }}
{{- end -}}

{{/* The file of a process. Takes root, component, v (its block of values) and, for workers, key, model, pool and own. */}}
{{- define "twinpool.config" -}}
{{- $layers := list .root.Values.config -}}
{{- if .model -}}
{{- if gt (int64 .v.gpu.count) 0 -}}{{- $layers = append $layers (dict "worker" (dict "device" "cuda")) -}}{{- end -}}
{{- $layers = append $layers (.model.config | default dict) -}}
{{- $layers = append $layers (.own.config | default dict) -}}
{{- end -}}
{{- $layers = append $layers (.v.config | default dict) -}}
{{- $layers = append $layers (include "twinpool.ownConfig" . | fromYaml) -}}
{{- $file := dict -}}
{{- range $layer := $layers -}}
{{- range $section, $keys := $layer -}}
{{- $found := get $file $section | default dict -}}
{{- range $key, $value := $keys -}}{{- $_ := set $found $key $value -}}{{- end -}}
{{- $_ := set $file $section $found -}}
{{- end -}}
{{- end -}}
{{- toYaml $file -}}
{{- end -}}
