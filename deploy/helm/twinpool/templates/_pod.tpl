{{/* What all pods have in common. */}}

{{/* Takes root, component, v, for workers key, and serviceAccount for a pod that calls the API of Kubernetes. The spec without containers,
volumes and grace. */}}
{{- define "twinpool.pod" -}}
{{- $root := .root -}}
serviceAccountName: {{ .serviceAccount | default (include "twinpool.serviceAccount" $root) }}
automountServiceAccountToken: {{ not (empty .serviceAccount) }}
# Kubernetes' variables for services would look like the product's own.
enableServiceLinks: false
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 $root.Values.securityContext.runAsUser }}
  runAsGroup: {{ int64 $root.Values.securityContext.runAsGroup }}
  fsGroup: {{ int64 $root.Values.securityContext.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .v.priorityClassName }}
priorityClassName: {{ . }}
{{- else }}
{{- if and $root.Values.priorityClasses.create (ne .component "operator") }}
priorityClassName: {{ include "twinpool.priorityClass" (dict "root" $root "kind" (empty .key | ternary "serving" "workers")) }}
{{- end }}
{{- end }}
{{- with .v.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .v.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .v.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .v.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- $spread := .v.topologySpread | default dict }}
{{- if $spread.enabled }}
topologySpreadConstraints:
  - topologyKey: {{ $spread.topologyKey }}
    maxSkew: {{ int64 $spread.maxSkew }}
    whenUnsatisfiable: {{ $spread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "twinpool.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Takes capabilities to add, perhaps none. */}}
{{- define "twinpool.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
    {{- with . }}
    add: {{ toJson . }}
    {{- end }}
{{- end -}}

{{/* Takes root and section (router, worker, control): the section of what listens. */}}
{{- define "twinpool.env" -}}
- name: HOME
  value: /tmp
# Also for commands that are run in the pod.
- name: TWINPOOL_CONFIG
  value: /etc/twinpool/config/config.yaml
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
# Others dial the address that is listened on: pods of a Deployment have no name in DNS.
- name: TWINPOOL_{{ upper .section }}__HOST
  value: $(POD_IP)
- name: TWINPOOL_METRICS__HOST
  value: $(POD_IP)
{{- if ne .section "control" }}
- name: TWINPOOL_{{ upper .section }}__NAME
  value: $(POD_NAME)
{{- else }}
- name: TWINPOOL_CONTROL
  value: $(POD_IP):{{ int64 .root.Values.ports.control }}
{{- end }}
{{- end -}}

{{/* Takes root, component, port, startSeconds. The kubelet's gRPC probes know no TLS: with it the process is asked by command. */}}
{{- define "twinpool.probes" -}}
{{- $probes := dict "startup" "live" "liveness" "live" "readiness" "" -}}
{{- range $probe, $service := $probes }}
{{ $probe }}Probe:
  {{- if $.root.Values.tls.enabled }}
  exec:
    command:
      - /bin/sh
      - -c
      - exec twinpool health "$POD_IP" --port {{ int64 $.port }} --role {{ include "twinpool.certificateRole" $ }} --service "{{ $service }}"
  timeoutSeconds: 10
  {{- else }}
  grpc:
    port: {{ int64 $.port }}
    {{- with $service }}
    service: {{ . }}
    {{- end }}
  timeoutSeconds: 5
  {{- end }}
  {{- if eq $probe "startup" }}
  periodSeconds: 5
  failureThreshold: {{ divf (float64 $.startSeconds) 5 | ceil | int64 }}
  {{- else }}
  periodSeconds: {{ eq $probe "readiness" | ternary 5 10 }}
  failureThreshold: {{ eq $probe "readiness" | ternary 2 6 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes of every process of the product. Take root, component, v and config: the name of its ConfigMap. */}}
{{- define "twinpool.mounts" -}}
- {name: config, mountPath: /etc/twinpool/config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/twinpool/tls, readOnly: true}
{{- end }}
{{- if include "twinpool.storeSecret" .root }}
- {name: etcd-auth, mountPath: /etc/twinpool/etcd-auth, readOnly: true}
{{- end }}
{{- if and (not .root.Values.etcd.enabled) .root.Values.externalEtcd.tlsSecret }}
- {name: etcd-tls, mountPath: /etc/twinpool/etcd-tls, readOnly: true}
{{- end }}
{{- with .v.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "twinpool.volumes" -}}
- name: config
  configMap: {name: {{ .config }}}
- name: tmp
  emptyDir: {}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "twinpool.tlsSecret" (dict "root" .root "role" (include "twinpool.certificateRole" .)) }}, defaultMode: 0440}
{{- end }}
{{- with include "twinpool.storeSecret" .root }}
- name: etcd-auth
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: password, path: password}]
{{- end }}
{{- if and (not .root.Values.etcd.enabled) .root.Values.externalEtcd.tlsSecret }}
- name: etcd-tls
  secret: {secretName: {{ .root.Values.externalEtcd.tlsSecret }}, defaultMode: 0440}
{{- end }}
{{- with .v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Models on disk. Take root and models: those that the pod needs, by key. */}}
{{- define "twinpool.modelMounts" -}}
{{- range $key, $model := .models }}
{{- if $model }}
- name: model-{{ $key }}
  mountPath: {{ include "twinpool.modelPath" (dict "key" $key "model" $model) | quote }}
  {{- with $model.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{- define "twinpool.modelVolumes" -}}
{{- range $key, $model := .models }}
{{- if $model }}
- name: model-{{ $key }}
  {{- if $model.tiny }}
  emptyDir: {}
  {{- else }}
  {{- toYaml (required (printf "models.%s needs a volume (or tiny, for tests)" $key) $model.volume) | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Random tiny checkpoints are written by each pod for itself; the same seed gives the same bytes. Takes root, models and image. */}}
{{- define "twinpool.modelInits" -}}
{{- range $key, $model := .models }}
{{- if and $model $model.tiny }}
- name: tiny-{{ $key }}
  image: {{ $.image }}
  imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
  command: [/bin/sh, -c]
  args:
    - test -e "$0/config.json" || exec twinpool model tiny "$0" --family "$1" --seed "$2"
    - {{ include "twinpool.modelPath" (dict "key" $key "model" $model) | quote }}
    - {{ $model.tiny.family | quote }}
    - {{ $model.tiny.seed | default 0 | int64 | quote }}
  env:
    - {name: HOME, value: /tmp}
  {{- include "twinpool.containerSecurity" list | nindent 2 }}
  volumeMounts:
    - {name: model-{{ $key }}, mountPath: {{ include "twinpool.modelPath" (dict "key" $key "model" $model) | quote }}}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
{{- end -}}
