"""Routes of the registry under `/api/`.

Heartbeats and registration are raw ASGI routes in front of Django (`localai_cluster/raw_routes.py`).
"""

from django.urls import path

from nodes.api import (
    backends,
    catalogue,
    events,
    identity,
    installs,
    labels,
    lifecycle,
    nodes,
    overrides,
    replicas,
    self_service,
)

urlpatterns = [
    path("node/<str:node_id>", self_service.SelfView.as_view()),
    path("node/<str:node_id>/drain", self_service.SelfDrainView.as_view()),
    path("node/<str:node_id>/resume", self_service.SelfResumeView.as_view()),
    path("node/<str:node_id>/rotate", self_service.SelfRotateView.as_view()),
    path("node/<str:node_id>/deregister", self_service.SelfDeregisterView.as_view()),
    path("node/<str:node_id>/models", self_service.SelfReplicasView.as_view()),
    # Words before ids: an id is never one of these.
    path("nodes", nodes.NodesView.as_view()),
    path("nodes/models", replicas.ReplicasView.as_view()),
    path("nodes/approve", lifecycle.ApproveManyView.as_view()),
    path("nodes/conflicts", identity.ConflictsView.as_view()),
    path("nodes/<str:node_id>", nodes.NodeDetailView.as_view()),
    path("nodes/<str:node_id>/models", replicas.NodeReplicasView.as_view()),
    path("nodes/<str:node_id>/approve", lifecycle.ApproveView.as_view()),
    path("nodes/<str:node_id>/reject", lifecycle.RejectView.as_view()),
    path("nodes/<str:node_id>/drain", lifecycle.DrainView.as_view()),
    path("nodes/<str:node_id>/resume", lifecycle.ResumeView.as_view()),
    path("nodes/<str:node_id>/labels", labels.LabelsView.as_view()),
    path("nodes/<str:node_id>/labels/<path:key>", labels.LabelView.as_view()),
    path("nodes/<str:node_id>/max-replicas-per-model", overrides.ReplicaCapView.as_view()),
    path("nodes/<str:node_id>/vram-budget", overrides.VramBudgetView.as_view()),
    path("nodes/<str:node_id>/conflicts", identity.NodeConflictsView.as_view()),
    path("nodes/<str:node_id>/conflicts/<str:conflict_id>/accept", identity.AcceptView.as_view()),
    path("nodes/<str:node_id>/conflicts/<str:conflict_id>/refuse", identity.RefuseView.as_view()),
    path("nodes/<str:node_id>/identity/rotate", identity.RotateView.as_view()),
    path("nodes/<str:node_id>/identity/revoke", identity.RevokeView.as_view()),
    path("nodes/<str:node_id>/events", events.EventsView.as_view()),
    path("nodes/<str:node_id>/backends", backends.NodeBackendsView.as_view()),
    path("nodes/<str:node_id>/backends/install", installs.InstallView.as_view()),
    path("backends", catalogue.BackendsView.as_view()),
]
