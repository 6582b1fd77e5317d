"""Runs as OpenTelemetry's spans and metrics: `spans` and `context` are pure, only `export` imports the SDK.

Loaded only if the environment asks for telemetry (`context.is_wanted`); the SDK is the extra `otel`.
"""
