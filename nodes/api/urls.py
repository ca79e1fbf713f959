"""Routes of the registry under `/api/`. The heartbeat is a raw ASGI route in front of Django."""

from django.urls import include, path

from nodes.api import (
    backend_views,
    identity_views,
    install_views,
    label_views,
    lifecycle_views,
    override_views,
    timeline_views,
    views,
)

urlpatterns = [
    path("node/", include("nodes.api.worker_urls")),
    # Words before ids: an id is never one of these.
    path("nodes", views.NodesView.as_view()),
    path("nodes/models", views.ReplicasView.as_view()),
    path("nodes/approve", lifecycle_views.ApproveManyView.as_view()),
    path("nodes/conflicts", identity_views.ConflictsView.as_view()),
    path("nodes/<str:node_id>", views.NodeDetailView.as_view()),
    path("nodes/<str:node_id>/models", views.NodeReplicasView.as_view()),
    path("nodes/<str:node_id>/approve", lifecycle_views.ApproveView.as_view()),
    path("nodes/<str:node_id>/reject", lifecycle_views.RejectView.as_view()),
    path("nodes/<str:node_id>/drain", lifecycle_views.DrainView.as_view()),
    path("nodes/<str:node_id>/resume", lifecycle_views.ResumeView.as_view()),
    path("nodes/<str:node_id>/labels", label_views.LabelsView.as_view()),
    path("nodes/<str:node_id>/labels/<path:key>", label_views.LabelView.as_view()),
    path("nodes/<str:node_id>/max-replicas-per-model", override_views.ReplicaCapView.as_view()),
    path("nodes/<str:node_id>/vram-budget", override_views.VramBudgetView.as_view()),
    path("nodes/<str:node_id>/conflicts", identity_views.NodeConflictsView.as_view()),
    path("nodes/<str:node_id>/conflicts/<str:conflict_id>/accept", identity_views.AcceptView.as_view()),
    path("nodes/<str:node_id>/conflicts/<str:conflict_id>/refuse", identity_views.RefuseView.as_view()),
    path("nodes/<str:node_id>/identity/rotate", identity_views.RotateView.as_view()),
    path("nodes/<str:node_id>/identity/revoke", identity_views.RevokeView.as_view()),
    path("nodes/<str:node_id>/events", timeline_views.EventsView.as_view()),
    path("nodes/<str:node_id>/backends", backend_views.NodeBackendsView.as_view()),
    path("nodes/<str:node_id>/backends/install", install_views.InstallView.as_view()),
    path("backends", backend_views.BackendsView.as_view()),
]
