"""Django's settings. Everything that an operator may change is in the table of `kit/settings_table.py`.

The web process keeps a pool of database connections, every other process persistent ones
(`docs/decisions/0003-processes.md`).
"""

import os
import sys
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import ProgrammingError

from localai_cluster import __version__
from localai_cluster.kit import conf as _conf
from localai_cluster.kit import env as _env
from localai_cluster.kit import logs

_BUNDLED_FILES = Path(__file__).resolve().parent / "bundled"
FILES = _BUNDLED_FILES if _BUNDLED_FILES.is_dir() else _BUNDLED_FILES.parent.parent
"""Folder of templates and pages: inside of an installed wheel, or at the top of a working copy."""
CLUSTER, _environment = _conf.load()

SECRET_KEY = CLUSTER.secret_key
SECRET_KEY_IS_STAND_IN = not SECRET_KEY
if SECRET_KEY_IS_STAND_IN:
    SECRET_KEY = os.urandom(32).hex()
DEBUG = CLUSTER.debug
LOG_LEVEL = CLUSTER.log_level
ALLOWED_HOSTS = CLUSTER.allowed_hosts
CSRF_TRUSTED_ORIGINS = CLUSTER.csrf_trusted_origins
_MANAGEMENT_COMMAND = (sys.argv[1:2] or [""])[0]
IS_WEB = _MANAGEMENT_COMMAND == "serve"
IS_BACKGROUND = _MANAGEMENT_COMMAND in ("controller", "qcluster", "prepare")
_PROCESS_KIND = {"serve": "web", "controller": "controller", "qcluster": "tasks"}.get(
    _MANAGEMENT_COMMAND, "command"
)
# Each connection costs a PostgreSQL process: every 15 s the pool closes one that it did not need.
_POOL_OPTIONS = {"min_size": 1, "max_size": 8, "timeout": 10, "max_idle": 15}
IDLE_TRANSACTION_SECONDS = 60
"""Seconds after which PostgreSQL ends a session that is idle within a transaction.

Its process is suspended or its machine has died, and the locks of the transaction stop other processes.
"""
_DEAD_PEER_OPTIONS = {
    # This side notices a dead server within a minute, and the server a dead machine of ours.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "options": f"-c idle_in_transaction_session_timeout={IDLE_TRANSACTION_SECONDS}s"
    " -c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3",
}


def _database_settings(url: str) -> dict[str, Any]:
    try:
        parts = dict(conninfo_to_dict(url))
    except ProgrammingError as error:
        _environment.problems.append(
            _env.Problem(
                "DATABASE_URL", str(error).strip(), "Use postgresql://user:password@host:port/database."
            )
        )
        parts = {}
    name, user, password, host, port = (
        str(parts.pop(key, "") or "") for key in ("dbname", "user", "password", "host", "port")
    )
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name or "cluster",
        "USER": user,
        "PASSWORD": password,
        "HOST": host,
        "PORT": port,
        "CONN_MAX_AGE": 0 if IS_WEB else 60,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {
            "application_name": f"localai-cluster-{_PROCESS_KIND}",
            **_DEAD_PEER_OPTIONS,
            **parts,
            # The last of two equal settings applies.
            "options": f"{_DEAD_PEER_OPTIONS['options']} {parts.get('options') or ''}".strip(),
            **({"pool": _POOL_OPTIONS} if IS_WEB else {}),
        },
        "TEST": {"NAME": f"test_{name or 'cluster'}"},
    }


DATABASES = {"default": _database_settings(CLUSTER.database_url)}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
CLUSTER_PROBLEMS = _environment.problems

INSTALLED_APPS = [
    "localai_cluster.apps.ProjectConfig",
    "localai_cluster.accounts.apps.AccountsConfig",
    "nodes.apps.NodesConfig",
    "operations.apps.OperationsConfig",
    "localai_cluster.apps.AdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "channels",
    "django_q",
]
MIDDLEWARE = [
    "localai_cluster.web.policy.SafeAnswers",
    "localai_cluster.web.policy.Sessions",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "localai_cluster.accounts.audit.AttributionMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "localai_cluster.urls"
ASGI_APPLICATION = "localai_cluster.asgi.application"
APPEND_SLASH = False
LOGIN_URL = "/login"
LOGIN_REDIRECT_URL = "/app"
PASSWORD_URL = "/app/password"
AUTHENTICATION_BACKENDS = [
    "localai_cluster.accounts.passwords.SessionBackend",
    "localai_cluster.accounts.sessions.KeyBackend",
]
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SESSION_ENGINE = "localai_cluster.accounts.sessions"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_AGE = 30 * 24 * 3600
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = bool(CLUSTER.web_tls)
X_FRAME_OPTIONS = "DENY"
DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [FILES / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("MinimumLengthValidator", "CommonPasswordValidator", "NumericPasswordValidator")
] + [{"NAME": "localai_cluster.accounts.passwords.ChosenPassword"}]

LANGUAGE_CODE = "en"
USE_I18N = False
FORMAT_MODULE_PATH = "localai_cluster.web.formats"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "/static/"
UI_DIST = FILES / "static" / "dist"
STATICFILES_DIRS = [FILES / "static" / "site", ("ui", UI_DIST)]
# The page's folder exists after the first `make ui`; until then the page shows the command to run.
SILENCED_SYSTEM_CHECKS = ["staticfiles.W004"]
STATIC_ROOT = FILES / "static" / "collected"

# The core layer of channels-redis closes idle websockets with redis-py 8; the pubsub layer does not.
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [CLUSTER.redis_url or "redis://127.0.0.1:6379/0"], "prefix": "cluster"},
    }
}

# The controller ticks the schedules (`scheduler` off here): django-q2's own loop polls only every 30 s.
Q_CLUSTER = {
    "name": "cluster",
    "orm": "default",
    "broker_class": "localai_cluster.broker.PatientBroker",
    "workers": 1,
    "timeout": 60,
    "retry": 90,
    "max_attempts": 2,
    # Seconds; schedules are seconds apart.
    "poll": 0.5,
    "bulk": 1,
    # Per function, so that the last run of a rare one stays stored.
    "save_limit": 20,
    "save_limit_per": "func",
    "catch_up": False,
    "scheduler": False,
    "label": "Tasks",
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "localai_cluster.accounts.authentication.BearerAuthentication",
        "localai_cluster.accounts.authentication.CookieAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["localai_cluster.accounts.authentication.IsAdmin"],
    "DEFAULT_RENDERER_CLASSES": ["localai_cluster.web.rest.FastJSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["localai_cluster.web.rest.StrictJSONParser"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "localai_cluster.web.rest.AlwaysJSON",
    "DEFAULT_METADATA_CLASS": None,
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "localai_cluster.web.envelopes.exception_handler",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "LocalAI Cluster",
    "DESCRIPTION": "Registry, operations and inference of a LocalAI cluster.",
    "VERSION": __version__,
    "SERVE_INCLUDE_SCHEMA": True,
    "SCHEMA_PATH_PREFIX": "/api",
    "ENUM_NAME_OVERRIDES": {
        "NodeStatus": "nodes.models.NodeStatus",
    },
    "PATH_CONVERTER_OVERRIDES": {"text": {"type": "string"}},
    "SWAGGER_UI_DIST": "SIDECAR",
    # A deep link is an anchor inside of the button that opens its operation: two controls in one place.
    "SWAGGER_UI_SETTINGS": {
        "deepLinking": False,
        "filter": True,
        "defaultModelsExpandDepth": -1,
        "docExpansion": "list",
    },
    "PREPROCESSING_HOOKS": ["localai_cluster.api_document.describe_views"],
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "localai_cluster.api_document.add_raw_routes",
    ],
}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {
        "request_id": {"()": "localai_cluster.kit.logs.RequestIdFilter"},
        "no_refusals": {"()": "localai_cluster.kit.logs.NoExpectedRefusals"},
        "repeat_limit": {"()": "localai_cluster.kit.outage.RepeatLimit"},
        "one_line_outages": {"()": "localai_cluster.kit.outage.OneLineOutages"},
    },
    "formatters": {
        "line": {
            "class": "localai_cluster.kit.logs.OneLineFormatter",
            "format": logs.LINE_FORMAT,
            "style": "{",
            "datefmt": logs.TIME_FORMAT,
        }
    },
    "handlers": {
        "console": {
            "class": "logging.StreamHandler",
            "filters": ["request_id", "repeat_limit", "one_line_outages"],
            "formatter": "line",
        }
    },
    "root": {"handlers": ["console"], "level": LOG_LEVEL},
    "loggers": {
        "django.channels.server": {"level": "WARNING"},
        "django.request": {"filters": ["no_refusals"]},
        # A caller's mistake, which gets 400: any client could fill the log with tracebacks.
        **{
            f"django.security.{mistake}": {"level": "CRITICAL"}
            for mistake in ("DisallowedHost", "DisallowedRedirect", "TooManyFieldsSent")
        },
        "daphne": {"level": "WARNING"},
        # Below that level it reports the behaviour of clients: connects, disconnects, invalid messages.
        "uvicorn": {"level": "ERROR"},
        "httpx": {"level": "WARNING"},
        "django-q": {"level": "WARNING"},
    },
}
