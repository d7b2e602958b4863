{{/* Name of the chart, in labels. */}}
{{- define "kvcm.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* What every object's name begins with. A release that is called like the chart does not say it twice. */}}
{{- define "kvcm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "kvcm.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvcm.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvcm.valkey" -}}
{{- include "kvcm.fullname" . }}-valkey
{{- end -}}

{{/* What selectors go by: nothing that an upgrade changes. Call with (dict "root" $ "component" "manager"). */}}
{{- define "kvcm.selector" -}}
app.kubernetes.io/name: {{ include "kvcm.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvcm.labels" -}}
{{ include "kvcm.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvcm.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "kvcm.fullname" .) -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvcm.image" -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (.tag | toString) -}}
{{- end -}}
{{- end -}}

{{- define "kvcm.managerImage" -}}
{{- include "kvcm.image" (dict "repository" .Values.image.repository "digest" .Values.image.digest "tag" (.Values.image.tag | default .Chart.AppVersion)) -}}
{{- end -}}

{{/* Secret with the ports' certificate; empty without TLS. */}}
{{- define "kvcm.tlsSecret" -}}
{{- if .Values.tls.enabled -}}
{{- if .Values.tls.certManager.enabled -}}
{{- .Values.tls.existingSecret | default (printf "%s-tls" (include "kvcm.fullname" .)) -}}
{{- else -}}
{{- required "tls.existingSecret is needed where tls.enabled is true and tls.certManager.enabled is false" .Values.tls.existingSecret -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names that a client may call a manager by. */}}
{{- define "kvcm.dnsNames" -}}
{{- $namespace := .Release.Namespace -}}
{{- range $service := list "" "-headless" "-admin" -}}
{{- $name := printf "%s%s" (include "kvcm.fullname" $) $service }}
- {{ $name }}
- {{ $name }}.{{ $namespace }}
- {{ $name }}.{{ $namespace }}.svc
- {{ $name }}.{{ $namespace }}.svc.{{ $.Values.clusterDomain }}
{{- end }}
- localhost
{{- range .Values.tls.certManager.extraDnsNames }}
- {{ . }}
{{- end }}
{{- end -}}

{{/* One value of a setting: numbers as they are written, not in exponents. */}}
{{- define "kvcm.setting" -}}
{{- if kindIs "string" . -}}{{ . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- end -}}

{{/* The managers' configuration file; what .Values.settings says wins. */}}
{{- define "kvcm.conf" -}}
{{- $settings := dict
  "kvcm.auth.mode" "required"
  "kvcm.auth.admin_key_file" "/run/secrets/kvcm/admin/admin.key"
  "kvcm.registry_storage.uri_file" "/run/secrets/kvcm/store/uri"
  "kvcm.startup_config" "/etc/kvcm/startup.json"
  "kvcm.service.drain_delay_ms" (mul .Values.drain.delaySeconds 1000)
  "kvcm.service.drain_timeout_ms" (mul .Values.drain.timeoutSeconds 1000)
  "kvcm.logger.format" "json" -}}
{{- if .Values.storages -}}
{{- $roots := list -}}
{{- range .Values.storages -}}
{{- $parent := clean .mountPath | dir -}}
{{- $roots = append $roots (ternary (clean .mountPath) $parent (eq $parent "/")) -}}{{/* never everything */}}
{{- end -}}
{{- $_ := set $settings "kvcm.storage.allowed_roots" (uniq $roots | join ",") -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $settings "kvcm.tls.cert_file" "/run/secrets/kvcm/tls/tls.crt" -}}
{{- $_ := set $settings "kvcm.tls.key_file" "/run/secrets/kvcm/tls/tls.key" -}}
{{- if .Values.tls.clients.caSecret.name -}}
{{- $_ := set $settings "kvcm.tls.client_ca_file" "/run/secrets/kvcm/client-ca/ca.crt" -}}
{{- $_ := set $settings "kvcm.tls.client_auth" .Values.tls.clients.auth -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := merge (deepCopy .Values.settings) $settings }}
{{ $key }}={{ include "kvcm.setting" $value }}
{{- end }}
{{- end -}}

{{- define "kvcm.gateway" -}}
{{- include "kvcm.fullname" . }}-gateway
{{- end -}}

{{/* The gateway's configuration file: TOML, in which strings and numbers are written as in JSON. */}}
{{- define "kvcm.gatewayToml" -}}
{{- $gateway := .Values.gateway -}}
{{- $settings := dict
  "host" "0.0.0.0"
  "port" 8080
  "policy" $gateway.policy
  "log_format" "json"
  "drain_timeout_ms" (mul $gateway.drain.timeoutSeconds 1000) -}}
{{- if $gateway.apiKeySecret.name -}}
{{- $_ := set $settings "api_key_file" "/run/secrets/kvcm/clients/key" -}}
{{- else -}}
{{- $_ := set $settings "insecure" true -}}
{{- end -}}
{{- if $gateway.engineKeySecret.name -}}
{{- $_ := set $settings "engine_key_file" "/run/secrets/kvcm/engines/key" -}}
{{- end -}}
{{- if eq $gateway.policy "kvcm" -}}
{{- $_ := set $settings "manager" (printf "%s.%s.svc:6381" (include "kvcm.fullname" .) .Release.Namespace) -}}
{{- $_ := set $settings "manager_key_file" "/run/secrets/kvcm/manager/key" -}}
{{- if .Values.tls.enabled -}}
{{- if eq .Values.tls.clients.auth "required" -}}
{{- fail "gateway.policy is kvcm and tls.clients.auth is required: a gateway shows managers a key and no certificate; set auth to optional, or another policy" -}}
{{- end -}}
{{- $_ := set $settings "manager_ca_file" "/run/secrets/kvcm/ca/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := mergeOverwrite $settings (deepCopy $gateway.settings) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- range $gateway.engines }}

[[engines]]
url = {{ toJson .url }}
{{- with .instance }}
instance = {{ toJson . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A probe's question. Where everybody has to show a certificate, the kubelet has none: the manager's own is shown. */}}
{{- define "kvcm.probe" -}}
{{- if and .root.Values.tls.enabled (eq .root.Values.tls.clients.auth "required") -}}
exec:
  command: [python, -m, kvcm.probe, {{ .page }}]
{{- else -}}
httpGet:
  path: /{{ .page }}
  port: http-admin
  {{- if .root.Values.tls.enabled }}
  scheme: HTTPS
  {{- end }}
{{- end -}}
{{- end -}}

{{/* The claim of a storage that has one. */}}
{{- define "kvcm.claim" -}}
{{- .storage.existingClaim | default (printf "%s-%s" (include "kvcm.fullname" .root) (.storage.name | lower | replace "_" "-" | replace "." "-")) -}}
{{- end -}}
