{{/* Pools as the worker groups of a RayCluster, which KubeRay runs. */}}

{{/* raycluster or statefulset. */}}
{{- define "twinpool.rayMode" -}}
{{- if eq .Values.ray.mode "auto" -}}
{{- .Capabilities.APIVersions.Has "ray.io/v1/RayCluster" | ternary "raycluster" "statefulset" -}}
{{- else -}}
{{- .Values.ray.mode -}}
{{- end -}}
{{- end -}}

{{/* Whether workers are Ray's: "true" or nothing. */}}
{{- define "twinpool.withRay" -}}
{{- if eq (include "twinpool.rayMode" .) "raycluster" -}}true{{- end -}}
{{- end -}}

{{- define "twinpool.rayName" -}}
{{- printf "%s-ray" (include "twinpool.fullname" .) -}}
{{- end -}}

{{- define "twinpool.rayAddress" -}}
{{- printf "%s.%s.svc:%d" (include "twinpool.rayName" .) .Release.Namespace (int64 .Values.ports.rayGcs) -}}
{{- end -}}

{{- define "twinpool.raySecret" -}}
{{- .Values.ray.auth.existingSecret | default (printf "%s-auth" (include "twinpool.rayName" .)) -}}
{{- end -}}

{{/* The resource that a pod of a pool's role offers once, and a worker of that role takes. Takes a pool. */}}
{{- define "twinpool.rayResource" -}}
{{- printf "twinpool-%s-%s" .pool .component -}}
{{- end -}}

{{/* Whether KubeRay's autoscaler makes and removes pods: "true" or nothing. */}}
{{- define "twinpool.rayScales" -}}
{{- range (include "twinpool.pools" . | fromJson).pools -}}
{{- if and .v.autoscaling.enabled (eq .v.autoscaling.type "ray") -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses what does not go together. */}}
{{- define "twinpool.checkRay" -}}
{{- $ray := include "twinpool.withRay" . -}}
{{- $pools := (include "twinpool.pools" . | fromJson).pools -}}
{{- if $ray -}}
{{- if not .Values.control.enabled -}}{{- fail "ray: control.enabled is false, and nobody else starts the workers of a RayCluster" -}}{{- end -}}
{{- end -}}
{{- range $pools -}}
{{- $a := .v.autoscaling -}}
{{- if $a.enabled -}}
{{- if and $ray (ne $a.type "ray") -}}{{- fail (printf "%s.autoscaling.type %s changes the replicas of a StatefulSet, and a RayCluster has none; set it to ray" .component $a.type) -}}{{- end -}}
{{- if and (not $ray) (eq $a.type "ray") -}}{{- fail (printf "%s.autoscaling.type ray needs a RayCluster, and ray.mode is %s" .component (include "twinpool.rayMode" $)) -}}{{- end -}}
{{- range $layer := list $.Values.config $.Values.control.config -}}
{{- if ($layer.rebalance | default dict).auto -}}{{- fail "rebalance.auto and autoscaling of a pool would both change its numbers: one of them has to be off" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes root and head or not. Environment of all processes of Ray. */}}
{{- define "twinpool.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN_PATH, value: /etc/twinpool/ray-auth/auth_token}
# Workers serve without a head; only restarts need it. A week.
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "604800"}
# Ray would run workers at niceness 15.
- {name: RAY_worker_niceness, value: "0"}
{{- end -}}

{{/* Options of `ray start` that every node has, as YAML. All ports are fixed, so that NetworkPolicies can name them. */}}
{{- define "twinpool.rayStart" -}}
node-manager-port: {{ int64 .Values.ports.rayNode | quote }}
object-manager-port: {{ int64 .Values.ports.rayObjects | quote }}
runtime-env-agent-port: {{ int64 .Values.ports.rayEnvironments | quote }}
min-worker-port: {{ int64 .Values.ports.rayFirst | quote }}
max-worker-port: {{ int64 .Values.ports.rayLast | quote }}
# Ray's least: KV never passes through it.
object-store-memory: "80000000"
# Workers write to the log of their pod.
no-redirect-output: "true"
include-log-monitor: "0"
disable-usage-stats: "true"
{{- end -}}

{{/* Asks a process of Ray; a pod without a worker is ready, too. Takes port and startSeconds. */}}
{{- define "twinpool.rayProbes" -}}
{{- range $probe := list "startup" "liveness" "readiness" }}
{{ $probe }}Probe:
  grpc: {port: {{ int64 $.port }}}
  timeoutSeconds: 5
  {{- if eq $probe "startup" }}
  periodSeconds: 5
  failureThreshold: {{ divf (float64 $.startSeconds) 5 | ceil | int64 }}
  {{- else }}
  periodSeconds: 10
  failureThreshold: {{ eq $probe "readiness" | ternary 3 6 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "twinpool.rayAuthMount" -}}
- {name: ray-auth, mountPath: /etc/twinpool/ray-auth, readOnly: true}
{{- end -}}

{{- define "twinpool.rayAuthVolume" -}}
- name: ray-auth
  secret:
    secretName: {{ include "twinpool.raySecret" . }}
    defaultMode: 0440
    items: [{key: auth_token, path: auth_token}]
{{- end -}}

{{/* The node of Ray beside the controller: a driver reaches a cluster through a node of its own host. */}}
{{- define "twinpool.rayNode" -}}
{{- $start := merge (dict "address" (include "twinpool.rayAddress" .) "node-ip-address" "$(POD_IP)" "num-cpus" "0" "num-gpus" "0") (include "twinpool.rayStart" . | fromYaml) -}}
- name: ray
  image: {{ include "twinpool.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  # A container that runs beside the others, and before them.
  restartPolicy: Always
  command: [ray, start]
  args:
    - --block
    {{- range $key, $value := $start }}
    - --{{ $key }}{{ if ne $value "true" }}={{ $value }}{{ end }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    {{- include "twinpool.rayEnv" . | nindent 4 }}
  ports:
    - {name: ray-node, containerPort: {{ int64 .Values.ports.rayNode }}}
    - {name: ray-objects, containerPort: {{ int64 .Values.ports.rayObjects }}}
  {{- include "twinpool.rayProbes" (dict "port" .Values.ports.rayNode "startSeconds" 300) | trim | nindent 2 }}
  resources: {{ toJson .Values.control.rayResources }}
  {{- include "twinpool.containerSecurity" list | nindent 2 }}
  volumeMounts:
    # The controller finds the node by files here.
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    {{- include "twinpool.rayAuthMount" . | nindent 4 }}
{{- end -}}
