{{- define "ragcache.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "ragcache.selector" -}}
app.kubernetes.io/name: ragcache
app.kubernetes.io/instance: {{ include "ragcache.name" . }}
{{- end }}

{{- define "ragcache.labels" -}}
{{ include "ragcache.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "ragcache.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "ragcache.model" -}}
{{- if eq .Values.model.source "hub" }}{{ .Values.model.hub.name }}{{ else }}{{ .Values.model.path }}{{ end -}}
{{- end }}

{{/* KV memory of an engine without a GPU is host memory. */}}
{{- define "ragcache.memoryMiB" -}}
{{- $kv := ternary .Values.engine.kvCacheGiB 0 (eq (int .Values.engine.gpus) 0) -}}
{{- $gib := addf .Values.engine.memoryGiB .Values.tiers.hostGiB .Values.engine.shmGiB $kv -}}
{{- mulf $gib 1024 | ceil | int -}}
{{- end }}

{{- define "ragcache.hasModels" -}}
{{- if has .Values.model.source (list "claim" "loader") }}true{{ end -}}
{{- end }}

{{/* The cache volume: disk tier with its margin, compiled code, downloads of the hub. */}}
{{- define "ragcache.cacheGiB" -}}
{{- addf (mulf .Values.tiers.disk.GiB 1.05) .Values.tiers.compiledGiB | ceil | int -}}
{{- end }}

{{- define "ragcache.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ragcache.containerSecurity" -}}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* Where the engine's pods run, and the Job beside them: a claim of one node is mounted there alone. */}}
{{- define "ragcache.placement" -}}
{{- $tolerations := .Values.tolerations -}}
{{- if gt (int .Values.engine.gpus) 0 -}}
{{- $tolerations = append $tolerations (dict "key" .Values.engine.gpuResource "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "ragcache.apiKey" -}}
- {name: RAGCACHE_API_KEY, valueFrom: {secretKeyRef: {name: {{ .Values.auth.apiKey.secret }}, key: {{ .Values.auth.apiKey.key }}}}}
{{- end }}

{{- define "ragcache.warmArgs" -}}
--store {{ .Values.warm.store | squote }} --wait-ready{{ range .Values.warm.args }} {{ . | squote }}{{ end }}
{{- end }}

{{/* What the schema cannot say, in the words of the values. */}}
{{- define "ragcache.check" -}}
{{- $scales := ne .Values.autoscaling.kind "none" -}}
{{- $several := or (gt (int .Values.replicas) 1) (and $scales (gt (int .Values.autoscaling.max) 1)) -}}
{{- if and (eq (int .Values.engine.gpus) 0) (eq (float64 .Values.engine.kvCacheGiB) 0.0) -}}
{{- fail "engine.gpus is 0 and engine.kvCacheGiB is 0: give the host memory for the KV cache of an engine without a GPU, e.g. engine.kvCacheGiB=4" -}}
{{- end -}}
{{- if and (gt (float64 .Values.tiers.shared.GiB) 0.0) (not .Values.tiers.shared.url) -}}
{{- fail "tiers.shared.GiB limits a shared store and tiers.shared.url is empty: give the url, or leave GiB at 0" -}}
{{- end -}}
{{- if and (not .Values.tiers.shared.url) (or .Values.tiers.shared.ttlSeconds .Values.tiers.shared.readOnly .Values.tiers.shared.password.secret .Values.tiers.shared.s3.secret) -}}
{{- fail "tiers.shared has ttlSeconds, readOnly, password.secret or s3.secret, and tiers.shared.url is empty: give the url, or leave them empty" -}}
{{- end -}}
{{- if and .Values.tiers.shared.readOnly (or (gt (float64 .Values.tiers.shared.GiB) 0.0) .Values.tiers.shared.ttlSeconds) -}}
{{- fail (printf "tiers.shared.readOnly is true, GiB is %v and ttlSeconds is %v, which limit what is written: leave them at 0, or leave readOnly out" .Values.tiers.shared.GiB .Values.tiers.shared.ttlSeconds) -}}
{{- end -}}
{{- if and .Values.tiers.disk.key.secret (eq (float64 .Values.tiers.disk.GiB) 0.0) (not .Values.tiers.shared.url) -}}
{{- fail "tiers.disk.key.secret is set, and there is neither a disk tier nor a shared store to encrypt: set tiers.disk.GiB or tiers.shared.url" -}}
{{- end -}}
{{- if and (has .Values.model.source (list "claim" "loader")) (not (hasPrefix "/models/" .Values.model.path)) -}}
{{- fail (printf "model.path is %s: with model.source %s the weights are below /models/" .Values.model.path .Values.model.source) -}}
{{- end -}}
{{- if and (eq .Values.model.source "hub") (not .Values.model.hub.name) -}}
{{- fail "model.source is hub and model.hub.name is empty: name a model, e.g. model.hub.name=org/my-model" -}}
{{- end -}}
{{- if and (eq .Values.model.source "loader") (or (not .Values.model.loader.image) (not .Values.model.loader.command)) -}}
{{- fail "model.source is loader: give model.loader.image and model.loader.command, which writes the weights below /models" -}}
{{- end -}}
{{- if and (eq .Values.model.source "claim") (eq .Values.model.claim.accessMode "ReadWriteOnce") $several -}}
{{- fail "model.claim.accessMode is ReadWriteOnce, which one node can mount, and there are several replicas: use ReadOnlyMany or ReadWriteMany, or model.source hub or loader" -}}
{{- end -}}
{{- if and (eq .Values.warm.mode "job") $several -}}
{{- fail "warm.mode is job, which warms one replica, and there are several: use warm.mode sidecar" -}}
{{- end -}}
{{- if and (ne .Values.warm.mode "none") (not (or (eq .Values.model.source "image") (hasPrefix "/models/" .Values.warm.store))) -}}
{{- fail (printf "warm.store is %s: the container sees the volume of the weights below /models/" .Values.warm.store) -}}
{{- end -}}
{{- if and (ne .Values.warm.mode "none") (eq .Values.model.source "hub") -}}
{{- fail "warm.mode needs a store of documents on the volume of the weights, and model.source hub has no such volume: run `ragcache warm` elsewhere" -}}
{{- end -}}
{{- if and (eq .Values.warm.mode "job") (eq .Values.model.source "loader") -}}
{{- fail "warm.mode is job and model.source is loader: the job does not see what the loader writes into the engine's pod, use warm.mode sidecar" -}}
{{- end -}}
{{- if and .Values.auth.tenants.secret .Values.monitoring.serviceMonitor.enabled (not .Values.monitoring.serviceMonitor.token.secret) -}}
{{- fail "auth.tenants.secret is set, so /metrics needs an operator's key: give monitoring.serviceMonitor.token.secret" -}}
{{- end -}}
{{- if and $scales (gt (int .Values.autoscaling.min) (int .Values.autoscaling.max)) -}}
{{- fail (printf "autoscaling.min is %v and autoscaling.max is %v: min must not be larger" .Values.autoscaling.min .Values.autoscaling.max) -}}
{{- end -}}
{{- if and $scales (eq (int .Values.autoscaling.min) 0) (or (ne .Values.autoscaling.kind "keda") (not .Values.autoscaling.workingHours.start)) -}}
{{- fail "autoscaling.min is 0: without a replica there is no metric that starts one: use autoscaling.kind keda with autoscaling.workingHours, or min 1" -}}
{{- end -}}
{{- if and (gt (int .Values.engine.gpus) 1) (lt (mulf .Values.engine.shmGiB 1024) (addf 160 (mulf 240 .Values.engine.gpus))) -}}
{{- fail (printf "engine.shmGiB is %v: the workers of %v GPUs need 160 MiB of /dev/shm and 240 MiB each, engine.shmGiB=%v" .Values.engine.shmGiB .Values.engine.gpus (divf (addf 160 (mulf 240 .Values.engine.gpus)) 1024 | ceil)) -}}
{{- end -}}
{{- $set := dict "--host-bytes" "tiers.hostGiB" "--disk-bytes" "tiers.disk.GiB" "--cache-dir" "tiers.disk.GiB" "--disk-key-file" "tiers.disk.key" "--kv-cache-bytes" "engine.kvCacheGiB" "--shared" "tiers.shared.url" "--shared-bytes" "tiers.shared.GiB" "--shared-ttl" "tiers.shared.ttlSeconds" "--shared-read-only" "tiers.shared.readOnly" "--tenants" "auth.tenants" "--api-key" "auth.apiKey" "--drain" "engine.drainSeconds" "--startup-timeout" "engine.startupSeconds" "--log-format" "engine.logFormat" -}}
{{- if has "--no-cache" .Values.engine.args -}}
{{- fail "engine.args has --no-cache: plain vLLM has no /ready, which the probe asks" -}}
{{- end -}}
{{- range .Values.engine.vllmArgs -}}
{{- $option := splitList "=" . | first -}}
{{- if has $option (list "--host" "--port" "--api-key") -}}
{{- fail (printf "engine.vllmArgs has %s: the chart sets the port for probes and services, and auth.apiKey the key" $option) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tiers.shared.s3.secret (not (hasPrefix "s3://" .Values.tiers.shared.url)) -}}
{{- fail (printf "tiers.shared.s3.secret is set, and tiers.shared.url is %s, not s3://" .Values.tiers.shared.url) -}}
{{- end -}}
{{- if and .Values.tiers.shared.password.secret (not (hasPrefix "redis" .Values.tiers.shared.url)) -}}
{{- fail (printf "tiers.shared.password.secret is set, and tiers.shared.url is %s, not redis://" .Values.tiers.shared.url) -}}
{{- end -}}
{{- if and $scales (gt (int .Values.replicas) (int .Values.autoscaling.max)) -}}
{{- fail (printf "replicas is %v and autoscaling.max is %v: replicas must not be larger" .Values.replicas .Values.autoscaling.max) -}}
{{- end -}}
{{- range .Values.engine.args -}}
{{- $option := splitList "=" . | first -}}
{{- with get $set $option -}}
{{- fail (printf "engine.args has %s, which the chart sets itself: use %s" $option .) -}}
{{- end -}}
{{- if has $option (list "--host" "--port" "--probe-port") -}}
{{- fail (printf "engine.args has %s: probes and services use the port that the chart sets" $option) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.tiers.shared.url (not .Values.networkPolicy.egress) -}}
{{- fail "networkPolicy.enabled keeps engines from tiers.shared.url: name the store in networkPolicy.egress" -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and (eq .kind "keda") (not .prometheusUrl) -}}
{{- fail "autoscaling.kind is keda and autoscaling.prometheusUrl is empty: give Prometheus' address" -}}
{{- end -}}
{{- $hours := list .workingHours.timezone .workingHours.start .workingHours.end | compact | len -}}
{{- if and (gt $hours 0) (or (lt $hours 3) (ne .kind "keda")) -}}
{{- fail "autoscaling.workingHours needs timezone, start and end, and autoscaling.kind keda" -}}
{{- end -}}
{{- end -}}
{{- end }}
