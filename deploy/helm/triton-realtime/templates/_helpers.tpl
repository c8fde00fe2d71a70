{{- define "realtime.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "realtime.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "realtime.labels" -}}
{{ include "realtime.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "realtime.claim" -}}
{{ .Values.persistence.existingClaim | default (printf "%s-artifacts" (include "realtime.name" .)) }}
{{- end -}}

{{- /* Seconds that an endpoint's removal takes to reach every node, before the gateway stops listening. */ -}}
{{- define "realtime.preStopSeconds" -}}10{{- end -}}

{{- /* `serve` stops gateway and front, then Triton; each gets drainTimeoutSeconds and 5 s more at the very worst. */ -}}
{{- define "realtime.graceSeconds" -}}
{{ add (include "realtime.preStopSeconds" . | int) (mul 3 (add .Values.serve.drainTimeoutSeconds 5)) }}
{{- end -}}

{{- define "realtime.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "realtime.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* What values.schema.json cannot say: what goes together. */ -}}
{{- define "realtime.check" -}}
{{- if not .Values.keys.existingSecret -}}
{{- fail "keys.existingSecret: required, a secret with keys.json; without keys nothing listens beyond loopback. fix: python -m orchestrator keys add --keys keys.json --tenant NAME, then kubectl create secret generic NAME --from-file=keys.json" -}}
{{- end -}}
{{- $most := ternary .Values.autoscaling.maxReplicas .Values.replicaCount .Values.autoscaling.enabled -}}
{{- if and (gt (int $most) 1) (not .Values.redis.urlSecret.name) -}}
{{- fail (printf "redis.urlSecret.name: required for %d replicas, which would each count quotas and budgets by themselves. fix: name a secret with Redis' URL, or replicaCount 1 without autoscaling" (int $most)) -}}
{{- end -}}
{{- if and .Values.build.enabled (not .Values.persistence.enabled) -}}
{{- fail "build.enabled: needs persistence.enabled, the volume that the artifact is made on" -}}
{{- end -}}
{{- if and .Values.serve.grpc.tlsSecret (not .Values.serve.grpc.enabled) -}}
{{- fail "serve.grpc.tlsSecret: given, but serve.grpc.enabled is false" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled (not .Values.serviceMonitor.metricsKeySecret.name) -}}
{{- fail "serviceMonitor.metricsKeySecret.name: required, a secret with a key made by `keys add --metrics`: without one /metrics answers 401" -}}
{{- end -}}
{{- if and (eq (int .Values.updateStrategy.maxSurge) 0) (eq (int .Values.updateStrategy.maxUnavailable) 0) -}}
{{- fail "updateStrategy: maxSurge and maxUnavailable are both 0, so no update could go on. fix: maxUnavailable 1 without a spare GPU, maxSurge 1 with one" -}}
{{- end -}}
{{- if and .Values.persistence.enabled (has "ReadWriteOncePod" .Values.persistence.accessModes) (or (gt (int $most) 1) .Values.build.enabled) -}}
{{- fail "persistence.accessModes: ReadWriteOncePod is for one pod alone, and there are several replicas, or a build beside them. fix: ReadWriteOnce on one node, ReadWriteMany on several" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas: above autoscaling.maxReplicas" -}}
{{- end -}}
{{- end -}}
