"""Runs as OpenTelemetry's spans and metrics: `spans` and `context` are pure, `export` alone knows the SDK.

Only loaded where the environment asks for telemetry (`context.is_wanted`); the SDK is the extra `otel`.
"""
