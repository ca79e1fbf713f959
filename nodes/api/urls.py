"""Routes of the registry under `/api/`. The heartbeat is a raw ASGI route in front of Django."""

from django.urls import include, path

from nodes.api import views

urlpatterns = [
    path("node/", include("nodes.api.worker_urls")),
    path("nodes", views.NodesView.as_view()),
    path("nodes/models", views.ReplicasView.as_view()),
    path("nodes/<str:node_id>", views.NodeDetailView.as_view()),
    path("nodes/<str:node_id>/approve", views.ApproveView.as_view()),
    path("nodes/<str:node_id>/models", views.NodeReplicasView.as_view()),
    path("nodes/<str:node_id>/backends/install", views.InstallView.as_view()),
]
