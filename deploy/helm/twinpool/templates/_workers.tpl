{{/* The pods of a pool, the same in a StatefulSet and in a RayCluster. Takes root and a pool: pool, component, key, model, own, v. */}}

{{/* The devices of a worker, as JSON. */}}
{{- define "twinpool.devices" -}}
{{- $devices := dict -}}
{{- range list .v.gpu .v.rdma -}}
{{- if gt (int64 .count) 0 -}}{{- $_ := set $devices .resource (int64 .count) -}}{{- end -}}
{{- end -}}
{{- toJson $devices -}}
{{- end -}}

{{- define "twinpool.workerPod" -}}
{{- $root := .root }}
{{- $v := .v }}
{{- $part := . }}
{{- $ray := include "twinpool.withRay" $root }}
{{- $config := include "twinpool.config" . }}
{{- $worker := ($config | fromYaml).worker }}
{{- $models := dict .key .model }}
{{- $devices := include "twinpool.devices" . | fromJson }}
metadata:
  labels:
    {{- include "twinpool.podLabels" (merge (dict "labels" $v.podLabels) $part) | nindent 4 }}
  annotations:
    checksum/config: {{ sha256sum $config }}
    {{- with $v.rdma.networks }}
    k8s.v1.cni.cncf.io/networks: {{ . | quote }}
    {{- end }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "twinpool.pod" $part | nindent 2 }}
  # SIGTERM drains (with Ray the hook before it): running requests, what a worker's leave takes at most beyond them, and the end of Ray.
  terminationGracePeriodSeconds: {{ add (ceil ($worker.drain_timeout_seconds | default 30)) 45 (empty $ray | ternary 0 15) | int64 }}
  {{- with include "twinpool.modelInits" (dict "root" $root "models" $models "image" (include "twinpool.workerImage" .)) }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "twinpool.workerImage" . }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- if not $ray }}
      args: [serve, {{ .component }}]
      {{- end }}
      env:
        {{- include "twinpool.env" (dict "root" $root "section" "worker") | nindent 8 }}
        - name: UCX_TCP_PORT_RANGE
          value: {{ printf "%d-%d" (int64 $root.Values.ports.transferFirst) (int64 $root.Values.ports.transferLast) | quote }}
        {{- if $ray }}
        {{- include "twinpool.rayEnv" $root | nindent 8 }}
        {{- end }}
        {{- with $v.rdma.devices }}
        - name: UCX_NET_DEVICES
          value: {{ . | quote }}
        {{- end }}
        {{- with $v.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: grpc, containerPort: {{ int64 $root.Values.ports.workerGrpc }}}
        - {name: events, containerPort: {{ int64 $root.Values.ports.workerEvents }}}
        - {name: replay, containerPort: {{ add1 $root.Values.ports.workerEvents }}}
        - {name: metrics, containerPort: {{ int64 $root.Values.ports.metrics }}}
      {{- if $ray }}
        - {name: ray-node, containerPort: {{ int64 $root.Values.ports.rayNode }}}
        - {name: ray-objects, containerPort: {{ int64 $root.Values.ports.rayObjects }}}
      {{- include "twinpool.rayProbes" (dict "port" $root.Values.ports.rayNode "startSeconds" $v.startTimeoutSeconds) | trim | nindent 6 }}
      lifecycle:
        # Ray ends a worker's process without a drain.
        preStop: {exec: {command: [python, -m, twinpool.worker.leave]}}
      {{- else }}
      {{- include "twinpool.probes" (dict "root" $root "component" .component "port" $root.Values.ports.workerGrpc "startSeconds" $v.startTimeoutSeconds) | trim | nindent 6 }}
      {{- end }}
      resources: {{ include "twinpool.merge" (list $v.resources (dict "limits" (merge (deepCopy $devices) ($v.resources.limits | default dict)) "requests" (merge (deepCopy $devices) ($v.resources.requests | default dict)))) }}
      {{- include "twinpool.containerSecurity" (gt (int64 $v.rdma.count) 0 | ternary (list "IPC_LOCK") list) | nindent 6 }}
      volumeMounts:
        {{- include "twinpool.mounts" $part | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        {{- if $ray }}
        {{- include "twinpool.rayAuthMount" . | nindent 8 }}
        {{- end }}
        {{- include "twinpool.modelMounts" (dict "models" $models) | nindent 8 }}
  volumes:
    {{- include "twinpool.volumes" (merge (dict "config" (include "twinpool.workerName" .)) $part) | nindent 4 }}
    {{- if $ray }}
    {{- include "twinpool.rayAuthVolume" $root | nindent 4 }}
    {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $v.sharedMemory }}}
    {{- include "twinpool.modelVolumes" (dict "models" $models) | nindent 4 }}
{{- end -}}
